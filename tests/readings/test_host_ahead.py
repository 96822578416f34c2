"""The clock's hosts wait where those of a run wait: a session trains on a device that computes behind its host.

The device is a stand-in. Each kernel that the session calls, and each update, occupies it for the picoseconds that the
clock has for that call; the host needs some for each launch. When either waits is up to the session alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunSpec
from penteract.engine.device.device import Cpu
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.rank.rank import Rank
from penteract.engine.session.session import Session, SessionOptions
from penteract.engine.session.trainer import Place
from penteract.ops.tape import Site
from penteract.readings.estimator import Estimator
from penteract.readings.time.clock import ps
from penteract.readings.time.ops import AXES
from penteract.readings.time.step import StepClock
from penteract.step import names
from penteract.step.program import compile_step

STEPS = 14
SMALL = ("--model.layers=2", "--model.hidden_size=64", "--batch.sequence_length=16",
         "--batch.global_batch_size=4", "--batch.micro_batch_size=2",
         "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=0",
         f"--training.steps={STEPS}")  # fmt: skip
PHASES = ("forward", "input_gradient", "weight_gradient")


@dataclass
class Machine:
    """Picoseconds until which the host and the device are busy. `ends`: when the device ended each step."""

    steps: StepClock
    launch: int
    took: dict[tuple[object, ...], int] = field(default_factory=dict)
    host: int = 0
    device: int = 0
    inside: bool = False  # of a kernel
    ends: list[int] = field(default_factory=list)

    def compute(self, picoseconds: int) -> None:
        self.host += self.launch
        self.device = max(self.device, self.host) + picoseconds

    def wait(self, moment: int) -> None:
        self.host = max(self.host, moment)

    def kernels(self, real: dict[str, TorchKernel]) -> dict[str, TorchKernel]:
        return {name: TorchKernel(*(self._kernel(phase, getattr(kernel, phase)) for phase in PHASES))
                for name, kernel in real.items()}  # fmt: skip

    def _kernel(self, phase: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(env: Any, site: Any, *tensors: Any) -> Any:
            self.compute(self.took[shaped(phase, site)])
            self.inside = True
            try:
                return run(env, site, *tensors)
            finally:
                self.inside = False

        return kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    """The machine that is put into the list has the place of the CPU, as a GPU behaves: it is behind its host."""
    now = list[Machine]()
    here, tolist = Place.here, torch.Tensor.tolist
    measure, update = Executor.measure, Executor.update

    def place(rank: Rank) -> Place:
        own = here(rank)
        return replace(own, kernels=lambda p: now[0].kernels(own.kernels(p)))

    def look(self: torch.Tensor) -> Any:
        if now[0].inside:  # one more call, whose result the host waits for
            now[0].host += now[0].launch
            now[0].wait(now[0].device)
        return tolist(self)

    def read(self: Cpu, x: torch.Tensor) -> Callable[[], list[float]]:
        numbers, end = tolist(x), now[0].device
        now[0].ends.append(end)

        def later() -> list[float]:
            now[0].wait(end)
            return numbers

        return later

    def measured(self: Executor, bucket: int) -> None:
        now[0].compute(ps(now[0].steps.bucket_costs.squares(self.p.buckets[bucket])))
        measure(self, bucket)

    def updated(self: Executor, bucket: int) -> None:
        now[0].compute(ps(now[0].steps.bucket_costs.update(self.p.buckets[bucket])))
        update(self, bucket)

    monkeypatch.setattr(Place, "here", staticmethod(place))
    monkeypatch.setattr(torch.Tensor, "tolist", look)
    monkeypatch.setattr(Cpu, "read", read)
    monkeypatch.setattr(Cpu, "behind", True)
    monkeypatch.setattr(Executor, "measure", measured)
    monkeypatch.setattr(Executor, "update", updated)
    with torch.no_grad():
        yield now


def clock(run: RunSpec, launch: float, *, at_once: bool = False) -> StepClock:
    """The clock of a run, whose host needs `launch` seconds for every call."""
    prices = Estimator(run.model, cluster("1xH100"), run.sequence_length, run.precision.policy)
    return replace(prices.steps, rates=replace(prices.rates, launch=launch, launches={}), at_once=at_once)


def machine(steps: StepClock, run: RunSpec) -> Machine:
    """What the clock has for each call, by its name and sizes: one line of the network may be called with several."""
    made, composer = Machine(steps, ps(steps.rates.launch)), steps.composer
    for kind in {kind for chain in composer.layers_of_rank(run.layout, 0) for kind, _ in chain}:
        layer = composer.layer_program(run.layout, kind)
        for action, ops in steps.layer_ops(run.layout, layer, (0,) * len(AXES)).items():
            for (job, _, _), own in zip(layer.outline.calls[action], ops.every, strict=True):
                place, phase = layer.outline.jobs[job]
                made.took[shaped(phase, layer.sites[place])] = own[0][1]
    return made


def shaped(phase: Any, site: Site) -> tuple[object, ...]:
    """A call by its name, and the sizes of its inputs and results; of routed rows, those of a row."""
    sizes = (math.prod(d for d in spec.shape if isinstance(d, int)) for spec in (*site.ins, *site.outs))
    return names.of_call(phase, site), *sizes


def calls(run: RunSpec) -> int:
    """How often the host of a rank without peers launches something in a step."""
    p = compile_step(run.model, run.layout, run.sequence_length, precision=run.precision.policy)
    return sum(1 for a in p.actions for _ in p.instructions(a)) + 2 * len(p.buckets)  # type: ignore[arg-type]


def opened(folder: Path, preset: str, share: float, device: list[Machine], *, at_once: bool = False) -> Session:
    """A session, whose host needs `share` of what the device needs of a step to launch it."""
    run = resolve(None, preset, [f"--output.folder={folder}", *SMALL], world=1).run
    launch = share * clock(run, 0.0).seconds(run.layout) / calls(run)
    device.append(machine(clock(run, launch, at_once=at_once), run))
    made = Session(run, Rank(0, 1, torch.device("cpu"), None), SessionOptions(folder))
    made.open()
    return made


def last(ends: list[int]) -> set[int]:
    """Picoseconds of the last steps."""
    return {b - a for a, b in zip(ends[-4:], ends[-3:], strict=False)}


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("share", [0.3, 0.95, 1.4])
def test_a_step_takes_as_long_as_in_a_session(preset: str, share: float, device: list[Machine], tmp_path: Path) -> None:
    made = opened(tmp_path, preset, share, device)
    made.go()
    run, at = made.spec, device[0]
    planned = ps(at.steps.seconds(run.layout))
    assert len(at.ends) == STEPS and last(at.ends) == {planned}
    slower = max(ps(clock(run, 0.0).seconds(run.layout)), calls(run) * at.launch)
    if preset == "tiny":  # nothing is waited for within a step: the slower of the two has no gap
        assert planned == slower
    else:
        assert planned > slower


@pytest.mark.parametrize("share", [0.3, 0.95, 1.4])
def test_steps_that_are_called_one_by_one_wait_for_each_other(
    share: float, device: list[Machine], tmp_path: Path
) -> None:
    made = opened(tmp_path, "tiny", share, device, at_once=True)
    run, at = made.spec, device[0]
    for number in range(1, 5):
        made.trainer.step(number, made.train, (number - 1) * run.layout.global_batch_size)
    planned = ps(at.steps.seconds(run.layout))
    assert last(at.ends) == {planned}
    assert planned > ps(clock(run, at.launch / 1e12).seconds(run.layout))

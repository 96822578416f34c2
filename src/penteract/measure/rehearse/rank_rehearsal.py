"""One rank of a run: its start, two steps, their updates, a validation and the plan of its checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from penteract.config.mesh import Mesh
from penteract.config.run import RunSpec
from penteract.engine.checkpoint.packing import LARGEST_FILE, packed
from penteract.engine.checkpoint.writing import entry
from penteract.engine.comm.groups import Channel
from penteract.engine.data.blank import Blank
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.moe.routing import Given, Routing
from penteract.engine.kernels.registry import Target, kernels
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.session.saved import state_slices
from penteract.engine.session.stand_ins import stand_ins
from penteract.engine.session.trainer import Place, Trainer
from penteract.errors import Bug
from penteract.measure.rehearse.checked_run import CheckedRun, host_tensors
from penteract.measure.rehearse.checks.kernel_calls import KernelCall, KernelCounter
from penteract.measure.rehearse.checks.price_check import ACTIVATIONS, VALIDATION, OwnerCount, check_price, owners
from penteract.measure.rehearse.findings import Fault, Findings, Stop
from penteract.measure.rehearse.ledger import HOST, Ledger, Moment
from penteract.measure.rehearse.wires import RehearsedComm, RehearsedDevice, RehearsedWire, WireEvent, WireLog
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price
from penteract.step.program import Program
from penteract.step.walk import walk_forward

BREAKS = (AssertionError, LookupError, Bug)  # what the engine's own checks raise
META = torch.device("meta")
Tamper = Callable[[Trainer], None]


class SavedFile(NamedTuple):
    """A file of the rank's checkpoint: its bytes with the header, and the rectangles in it."""

    name: str
    bytes: int
    rectangles: int


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """What one rank does.

    at         its coordinates
    resident   bytes of the device after the start; `peak`: the most in a steady step
    owners     bytes by owner, beside their price
    timeline   after each action of a steady step
    wires      of both steps, and of a validation, in order; `events`: their starts and waits
    first      wires of the first step, which counts its targets; `steady`: those of the second
    groups     that it makes, with the channel of messages
    kernels    how often each kind of call was made, and `workspaces`: what it makes and frees
    allocations  how many storages of so many bytes an owner was given, at the start and in the first call of each kind
    stopped    a fault ended its walk: its wires are not all that a step has
    """

    rank: int
    at: dict[str, int]
    resident: int
    peak: int
    owners: tuple[OwnerCount, ...] = ()
    timeline: tuple[Moment, ...] = ()
    wires: tuple[RehearsedWire, ...] = ()
    events: tuple[WireEvent, ...] = ()
    first: range = range(0)
    steady: range = range(0)
    groups: tuple[tuple[tuple[int, ...], Channel], ...] = ()
    kernels: dict[KernelCall, int] = field(default_factory=dict[KernelCall, int])
    workspaces: dict[KernelCall, int] = field(default_factory=dict[KernelCall, int])
    allocations: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    checkpoint: tuple[SavedFile, ...] = ()
    faults: tuple[Fault, ...] = ()
    stopped: bool = False


def rehearse_rank(
    spec: RunSpec,
    rank: int,
    target: Target,
    *,
    steps: int = 2,
    given: Given | None = None,
    tamper: Tamper | None = None,
) -> RankRehearsal:
    """Rehearse one rank. `steps`: the second is as all later ones; 1: what goes on wires in the first is all that is
    asked for. `given`: where a run's routers sent tokens; `tamper`: changes the trainer before its first step, for
    tests. Raises BadInput where the run's own start would."""
    return _Rehearsing(spec, rank, target, steps, given, tamper).all()


@dataclass(slots=True)
class _Rehearsing:
    spec: RunSpec
    rank: int
    target: Target
    steps: int
    given: Given | None
    tamper: Tamper | None
    ledger: Ledger = field(default_factory=Ledger)
    findings: Findings = field(init=False)
    log: WireLog = field(init=False)
    calls: dict[str, KernelCounter] = field(default_factory=dict[str, KernelCounter])

    def __post_init__(self) -> None:
        self.findings = Findings(self.rank)
        self.log = WireLog(self.findings)

    def all(self) -> RankRehearsal:
        with stand_ins(), self.ledger:
            try:
                trainer = self._start()
            except BREAKS as error:
                return self._broken(error)
            label(self.ledger, trainer)
            resident = self.ledger.now
            if self.tamper is not None:
                self.tamper(trainer)
            try:
                first, steady, peak, timeline, at_peak, largest = self._steps(trainer)
            except (Stop, *BREAKS) as error:
                if not self.findings.faults:
                    return self._broken(error)
                return self._made(
                    trainer, RankRehearsal(self.rank, self._at(trainer.program), resident, 0, stopped=True)
                )
            held = state_slices(trainer.program, trainer.state)
            files = packed([entry(s, finite=False) for s in held], self.rank, LARGEST_FILE)
        found = list[OwnerCount]()
        if self.steps > 1 and not self.findings.faults:  # a program with a fault may have no price
            padded = trainer.program.layout.pads_rows  # which takes the same memory whatever came
            load = None if self.given is None or padded else Recorded(trainer.run.received)
            found += owners(largest, at_peak, price(trainer.program, load))
            check_price(found, self.findings)
        made = RankRehearsal(
            self.rank, self._at(trainer.program), resident, peak, tuple(found), timeline,
            first=first, steady=steady, checkpoint=tuple(SavedFile(f.name, f.bytes, len(f.entries)) for f in files),
        )  # fmt: skip
        return self._made(trainer, made)

    def _broken(self, error: Exception) -> RankRehearsal:
        """A rank whose own checks have raised."""
        self.findings.add("PROGRAM", " ".join(str(error).split()) or type(error).__name__)
        at = Mesh(self.spec.layout).coordinates(self.rank)
        return RankRehearsal(self.rank, at, 0, 0, faults=tuple(self.findings.faults), stopped=True)

    def _start(self) -> Trainer:
        """The run's own start, at a place without numbers."""
        device = RehearsedDevice(self.log)
        place = Place(device, self.target, self._kernels)
        world = self.spec.layout.world
        rank = Rank(self.rank, world, META, None, RankProgress(self.spec.limits))
        return Trainer.on(self.spec, rank, place)

    def _kernels(self, p: Program) -> dict[str, TorchKernel]:
        routing = Routing(p, self.given) if self.given is not None else Routing(p)
        calls = KernelCounter(p, self.target.type, self.ledger, self.findings, self.log, routing)
        self.calls["step" if not self.calls else "validation"] = calls
        return calls.of(kernels(p, torch.device(self.target.type)))

    def _steps(self, trainer: Trainer) -> Any:
        """Two steps: the first makes all registers, the second is as all others; and what validation does."""
        samples: Any = Blank(self.spec.sequence_length)
        run, ledger = trainer.run, self.ledger
        checked = CheckedRun(run, ledger, self.findings)
        batch, bounds = self.spec.layout.global_batch_size, [len(self.log.wires)]
        trainer.run = checked  # type: ignore[assignment]
        for number in range(1, self.steps + 1):
            ledger.settle()
            trainer.start(number, samples, (number - 1) * batch)
            bounds.append(len(self.log.wires))
        found = ledger.peak, tuple(ledger.timeline), dict(ledger.at_peak), Counter(ledger.largest)
        trainer.run = run
        run.settle_parameters()
        if self.spec.train.validation_every and self.steps > 1:
            checked: Any = CheckedRun(trainer.validation_run, ledger, self.findings)
            walk_forward(trainer.validation_run.p, checked)
        return range(bounds[0], bounds[1]), range(bounds[-2], bounds[-1]), *found

    def _made(self, trainer: Trainer, made: RankRehearsal) -> RankRehearsal:
        comm = trainer.run.comm
        assert isinstance(comm, RehearsedComm)
        step = self.calls["step"]
        return replace(
            made, wires=tuple(self.log.wires), events=tuple(self.log.events), groups=tuple(comm.groups.made),
            kernels=step.counts, workspaces=step.workspaces, allocations=dict(+self.ledger.allocations),
            faults=tuple(self.findings.faults),
        )  # fmt: skip

    def _at(self, p: Program) -> dict[str, int]:
        return p.mesh.coordinates(self.rank)


def label(ledger: Ledger, trainer: Trainer) -> None:
    """Say whose the storages are that a start has made."""
    state, run = trainer.state, trainer.run
    for flat in state.flats:
        ledger.label([flat.own_parameter], "parameters")
        ledger.label([flat.own_gradient], "gradients")
    for flat in state.flats:
        ledger.label([] if flat.bucket.offloaded else flat.optimizer_state.values(), "optimizer")
    ledger.label((x for buffers in state.staging for x in buffers.values()), "optimizer")
    ledger.label(state.ring_buffers, "ring_buffer")
    ledger.label((x for batch in run.micro_batches for x in batch.values()), "data")
    if state.history is not None:
        ledger.label([state.history.steps, state.history.past_amax, state.history.amax], "data")
    if state.quantised_weights is not None:
        ledger.label([state.quantised_weights.table], "data")
    if state.largest_weights is not None:
        ledger.label([state.largest_weights.table], "data")
    ledger.label([state.zeros.table], "data")
    ledger.label(trainer.validation_run.memory.resident(), VALIDATION)
    ledger.label(run.memory.resident(), ACTIVATIONS)
    ledger.label(host_tensors(run), HOST)
    if trainer.validation_run.host is not None:
        ledger.label(trainer.validation_run.host.resident(), HOST)

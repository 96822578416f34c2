"""What is saved in the background is what a save at once writes, byte for byte, however late the copies are."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import draws, further
from layouts import Case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.checkpoint import rank_file
from penteract.engine.checkpoint.background.shared_memory import SharedMemory
from penteract.engine.checkpoint.background.writer_process import Service
from penteract.engine.checkpoint.packing import LARGEST_FILE
from penteract.engine.checkpoint.writing import entry
from penteract.engine.device.copies import Copied, CopyOut
from penteract.engine.device.device import Cpu, Cuda
from penteract.engine.executor.cuda_graph import CapturedStep
from penteract.engine.session.background import snapshot as snapshots
from penteract.engine.session.background.snapshot import Snapshot, SnapshotPlan
from penteract.engine.session.saved import KINDS, state_slices
from penteract.engine.state.state import TrainingState, allocate
from penteract.errors import BadNumerics, Bug
from penteract.step.program import Program
from precisions import BY_NAME, SMALL
from strategies import cases
from tiny import SIZES

CPU = torch.device("cpu")
NARROW = replace(RECIPES["bf16"], reduce="bf16", master="", stochastic=True, moments="int8")
WHOLE_MASTER = replace(RECIPES["bf16"], master="fp32", moments="bf16")
PRECISIONS = [*(RECIPES[n] for n in ("fp64", "fp32", "bf16", "fp16")), NARROW, WHOLE_MASTER, BY_NAME]
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]


@dataclass(slots=True)
class Late(Copied):
    """Copies that are made at the last moment that is allowed: when somebody waits for them."""

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    done: bool = False

    def wait(self) -> None:
        for x, y in () if self.done else self.pairs:
            y.copy_(x)
        self.done = True

    def arrived(self) -> bool:
        return self.done

    def settle(self) -> None:
        self.wait()


class LateDevice(Cpu):
    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut:
        return Late(pairs)


def filled(p: Program, seed: int) -> TrainingState:
    """A state of finite numbers."""
    state, dice = allocate(p, CPU), torch.Generator().manual_seed(seed)
    for flat in state.flats:
        flat.own_parameter.view(torch.uint8).random_(0, 64, generator=dice)
        for kind in KINDS.values():
            if (kept := flat.kept(kind)) is not None:
                flat.write(kind, slice(0, len(kept)), torch.randn(len(kept), generator=dice).to(stat(p)))
    for x in small(state):
        x.copy_(torch.randn(x.shape, generator=dice))
    return state


def stat(p: Program) -> torch.dtype:
    from penteract.engine.dtypes import dtype_of

    return dtype_of("stat", p.precision)


def small(state: TrainingState) -> list[torch.Tensor]:
    scaling = [] if state.scaling is None else [state.scaling.values]
    history = [] if state.history is None else [state.history.steps]
    return [*scaling, *history, *state.biases.values()]


def spoil(state: TrainingState, snapshot: Snapshot) -> None:
    """The next step: first what is not in buckets changes, then bucket after bucket."""
    for x in small(state):
        x.add_(1)
    for number in reversed(range(len(state.flats))):
        snapshot.before_update(number)
        for x in (state.flats[number].own_parameter, *state.flats[number].optimizer_state.values()):
            x.view(torch.uint8).bitwise_xor_(37)


@dataclass(slots=True)
class Saved:
    """The files of one state: written at once, and from its snapshot after the next update."""

    at_once: dict[str, bytes]
    later: dict[str, bytes]
    tables: list[str] = field(default_factory=list[str])


def saved(
    p: Program, seed: int, device: Cpu, update: Callable[[TrainingState, Snapshot], None] = spoil,
    largest: int = LARGEST_FILE,
) -> Saved:  # fmt: skip
    state, rank = filled(p, seed), p.rank
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "one", Path(folder) / "other"
        one.mkdir()
        other.mkdir()
        table = rank_file.write(one, [entry(s, finite=True) for s in state_slices(p, state)], rank, 1, largest)
        plan = SnapshotPlan(p, state)
        memory, payload = SharedMemory.of_size("test", max(1, plan.size)), SharedMemory.of_size("test")
        snapshot = Snapshot(plan, device, memory)
        snapshot.take()
        update(state, snapshot)
        snapshot.settle()
        assert snapshot.arrived()
        service = Service(memory, payload)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(snapshots, "LARGEST_FILE", largest)
            description = plan.description(threads=3)  # the other has one
        payload.put(description)
        assert service.answer({"do": "describe", "length": len(description)}) == {"length": 0}
        answer = service.answer({"do": "write", "fresh": str(other)})
        assert "error" not in answer, answer
        texts = [table.text(), payload.get(answer["length"]).decode()]
        found = Saved(*[{file.name: file.read_bytes() for file in at.iterdir()} for at in (one, other)], texts)
        assert all(len(data) <= largest for data in found.later.values())
        memory.close()
        payload.close()
        return found


@draws(20, wide=300)
@given(cases(), st.integers(0, 7), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS), st.integers(0, 99),
       st.sampled_from([LARGEST_FILE, 2**14, 2**11, 700]))  # fmt: skip
def test_every_byte_is_that_of_a_save_at_once(
    case: Case, of: int, precision: Policy, optimizer_kinds: OptimizerKinds, seed: int, largest: int
) -> None:
    if optimizer_kinds is not PLAIN:
        case = replace(case, layout=replace(case.layout, offload_optimizer=False))
    p = replace(case, precision=precision, optimizer_kinds=optimizer_kinds).compile(of % case.layout.world)
    found = saved(p, seed, LateDevice(), largest=largest)
    assert found.later == found.at_once
    assert found.tables[0] == found.tables[1]


@pytest.mark.parametrize("precision", [*PRECISIONS[3:], *further((one,) for one in PRECISIONS[:3])], ids=str)
def test_and_of_state_that_is_cut_to_fit_into_files(precision: Policy) -> None:
    """The rectangles of a small model are larger than these files."""
    p = Case(ModelSpec(**SIZES), Layout(dp=2, zero=1), precision=precision).compile(1)
    found = saved(p, 3, LateDevice(), largest=700)
    assert found.later == found.at_once
    assert len(found.later) > 20


def test_and_the_history_of_delayed_scales() -> None:
    p = Case(SMALL, Layout(), precision="fp8_delayed").compile(0)
    found = saved(p, 5, LateDevice())
    assert b"/largest" in found.later["rank-00000.safetensors"]
    assert found.later == found.at_once


def program(layout: Layout, precision: str = "bf16") -> Program:
    return Case(ModelSpec(**SIZES), layout, precision=precision).compile(0)


@pytest.mark.parametrize("layout", [Layout(), Layout(offload_optimizer=True), Layout(dp=2, zero=3)], ids=str)
def test_an_update_that_does_not_wait_is_found(layout: Layout) -> None:
    def hasty(state: TrainingState, snapshot: Snapshot) -> None:
        spoil(state, SimpleNamespace(before_update=lambda number: None))  # type: ignore[arg-type]

    found = saved(program(layout), 1, LateDevice(), hasty)
    assert found.later != found.at_once


@pytest.mark.parametrize("threads", [1, 3])
def test_a_value_that_is_not_finite_is_named(threads: int) -> None:
    p = program(Layout(), "fp32")
    state = filled(p, 1)
    next(state.parameter_parts("square")).values[-1] = float("nan")
    plan = SnapshotPlan(p, state)
    memory, payload = SharedMemory.of_size("test", plan.size), SharedMemory.of_size("test")
    Snapshot(plan, Cpu(), memory).take()
    service = Service(memory, payload)
    payload.put(plan.description(threads))
    service.answer({"do": "describe", "length": len(plan.description(threads))})
    with tempfile.TemporaryDirectory() as folder:
        answer: Any = service.answer({"do": "write", "fresh": folder})
    assert answer["error"]["kind"] == BadNumerics.__name__
    assert answer["error"]["where"].endswith("/square")


def test_a_disk_that_fails_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = program(Layout(), "fp32")
    entries, written = [entry(s, finite=True) for s in state_slices(p, filled(p, 1))], list[int]()

    def full(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        written.append(at)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(buffers[0])

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        rank_file.write(tmp_path, entries, 0, threads=3)
    assert len(written) < len(entries) / 2
    assert not list(tmp_path.iterdir())


def test_a_rank_copies_only_what_it_writes() -> None:
    """Each element once over all ranks, in the dtype in which it is kept."""
    model, layout = ModelSpec(**SIZES), Layout(dp=4, zero=1)
    programs = [Case(model, layout, precision="bf16").compile(rank) for rank in range(4)]
    sizes = [SnapshotPlan(p, allocate(p, CPU)).size for p in programs]
    elements = sum(q.numel(p.mesh) for p in programs[:1] for q in p.params)
    kept = 2 + 2 + 4 + 4  # the parameter, the other half of its master weight, two moments
    assert elements * kept <= sum(sizes) < 1.02 * elements * kept


def test_a_captured_step_is_refused() -> None:
    run = SimpleNamespace(p=program(Layout()), before_update=lambda number: None)
    with pytest.raises(Bug, match="does not wait for the copies"):
        CapturedStep(run).capture()  # type: ignore[arg-type]


def test_on_a_gpu_the_next_update_waits_for_the_copies_and_they_for_what_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the order of calls alone: no GPU is here."""
    seen = list[str]()

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(f"in {self.name}")

        def __exit__(self, *error: object) -> None:
            seen.append(f"out of {self.name}")

        def wait_stream(self, other: Stream) -> None:
            seen.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            seen.append(f"{self.name} waits for an event")

    class Event:
        def record(self, stream: Stream) -> None:
            seen.append(f"event in {stream.name}")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            seen.append("the host waits")

    class Tensor:
        def copy_(self, x: object, non_blocking: bool = False) -> None:
            seen.append(f"copy, {non_blocking}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda at: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("compute"))
    copies = Cuda(torch.device("cuda", 0)).copy_out([(Tensor(), Tensor())] * 2)  # type: ignore[list-item]
    assert not copies.arrived()
    copies.wait()
    copies.settle()
    assert seen == [
        "side waits for compute", "in side", "copy, True", "copy, True", "event in side", "out of side",
        "compute waits for an event", "the host waits",
    ]  # fmt: skip

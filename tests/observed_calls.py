"""What one rank of a real run does, in order, written down from outside: in one process, without peers.

Nothing here knows a rule of a step. The run is given kernels that compute nothing but say which they are, and a fake
`Comm` and `Device` that tell what is put on a wire, copied, or waited for. What it does beside calls is seen at the
functions that do it.

`walked.py` says the same of a program; `engine/test_order.py` holds one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from layouts import CPU, Case
from penteract.config.run import Optimizer
from penteract.engine.comm.fake import FakeComm
from penteract.engine.device import device
from penteract.engine.executor import executor as run_module
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.quantised.fp8 import emulated
from penteract.engine.kernels.quantised.fp8_linear import TORCH, Fp8Kernels
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.optim.muon import Muon
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.state.state import TrainingState, allocate
from penteract.ops.spec import Spec
from penteract.ops.tape import Site
from penteract.step.program import Program
from penteract.step.walk import walk

ROWS = 2  # that every expert of a rank gets from each rank


class Seen(NamedTuple):
    """One thing that a rank does.

    kernel       a phase of an op's kernel, with the line that said the op
    start      a collective on `ranks`; its `bytes` as a ledger has them
    send, recv a message to or from `ranks[0]`, on the line of `name`; of a batch, all have the same number
    copy       to or from the host, of `name`
    wait       for what has this number
    narrow, widen, wait_reduce_scatter, measure, update, quantise   work on a bucket beside its sums and gathers

    number     of what is started, in order, from 0
    stream     that waits with it, or does it: "compute", or "waits" beside it
    """

    what: str
    name: str = ""
    phase: str = ""
    line: str = ""
    ranks: tuple[int, ...] = ()
    bytes: int = 0
    number: int = -1
    bucket: int = -1
    stream: str = "compute"


class Observation(NamedTuple):
    """`received`: rows that experts got, by (layer, micro-batch): what a walk must be told of the run's load."""

    seen: list[Seen]
    received: Mapping[tuple[int, int], int]


def observe(case: Case, rank: int, *, counted: bool = True) -> list[Seen]:
    """What `rank` does in one step with an update, in order. `counted`: as `walk` has it."""
    return observation(case.compile(rank), counted=counted).seen


def observation(p: Program, *, counted: bool = True) -> Observation:
    """Of the program of one rank."""
    notes = _Notes(p.rank)
    with notes.watching():
        state = allocate(p, CPU)
        comm = FakeComm(p.rank, notes)
        run = Executor(p, state, comm, _bodies(notes), _Zeros(p.precision, CPU), fake=device.FakeDevice(notes))
        said = (Optimizer(), CPU, 0, state.scaling)
        muon = any(b.optimizer_kind.by_matrix for b in p.buckets)
        made = Muon(*said, comm=comm, policy=p.precision) if muon else AdamW(*said)
        run.optimizer = _Moving(made, notes)  # type: ignore[assignment]
        run.micro_batches = [_Nothing()] * p.layout.gradient_accumulation_steps  # type: ignore[list-item]
        notes.know(state, run)
        walk(p, run, targets_counted=counted)
        run.settle_parameters()
    after = next((i for i, s in enumerate(notes.seen) if s.what == "end"), len(notes.seen))
    return Observation(notes.seen[:after], run.received)


# ---- notes -------------------------------------------------------------------------------------------------------


@dataclass
class _Notes:
    """What has been seen so far."""

    rank: int
    seen: list[Seen] = field(default_factory=list)
    started: int = 0
    stream: str = "compute"
    shards: dict[int, int] = field(default_factory=dict)  # address of a shard's gradients -> its bucket
    buckets: dict[int, int] = field(default_factory=dict)  # identity of a bucket -> its number
    host: set[int] = field(default_factory=set)  # storages that are there
    inside: int = 0  # of something that has been written down as a whole

    def know(self, state: TrainingState, run: Executor) -> None:
        """What addresses and identities mean."""
        for i, flat in enumerate(state.flats):
            self.shards[flat.own_gradient.data_ptr()] = i
            self.buckets[id(flat.bucket)] = i
            if flat.cut_gradient is not None:
                flat.cut_gradient = flat.cut_gradient.as_subclass(_watched(self))
        if state.quantised_weights is not None:
            state.quantised_weights.quantiser = state.quantised_weights.quantiser._replace(quantise_into=self._quantise)
        there = [*state.on_host(), *([] if run.host is None else run.host.resident())]
        self.host = {t.untyped_storage()._cdata for t in there}

    def add(self, what: str, name: str = "", **more: Any) -> None:
        self.seen.append(Seen(what, name, stream=self.stream, **more))

    def start(self, what: str, name: str = "", **more: Any) -> _Handle:
        self.add(what, name, number=self.started, **more)
        self.started += 1
        return _Handle(self, self.started - 1)

    def _quantise(self, name: str, values: torch.Tensor, *_: Any) -> None:
        self.add("quantise", bytes=values.nbytes)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All functions by which a run does something beside its kernels."""
        with ExitStack() as stack:
            for name, function in _works(self).items():
                stack.enter_context(patch.object(run_module, name, function))
            yield

    # ---- what the fakes tell -------------------------------------------------------------------------------------

    def on_wire(self, kind: str, ranks: tuple[int, ...], amount: int, what: str = "") -> _Handle:
        if kind in ("send", "recv"):
            return self.start(kind, what, ranks=ranks, bytes=amount)
        if kind != "shift":
            return self.start("start", kind, ranks=ranks, bytes=amount)
        following, before = ranks  # one batch: two messages of the same number
        handle = self.start("send", ranks=(following,), bytes=amount)
        self.add("recv", ranks=(before,), bytes=amount, number=handle.number)
        return handle

    def on_copy(self, y: torch.Tensor) -> _Handle:
        way = "to_host" if y.untyped_storage()._cdata in self.host else "from_host"
        return self.start("copy", way, bytes=y.nbytes)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.stream = "waits"
        yield
        self.stream = "compute"


@dataclass(frozen=True)
class _Handle:
    """Of what has been started."""

    notes: _Notes
    number: int

    def wait(self) -> None:
        self.notes.add("wait", number=self.number)


# ---- work beside calls -------------------------------------------------------------------------------------------


def _works(notes: _Notes) -> dict[str, Any]:
    real = {name: getattr(run_module, name) for name in ("squares", "narrowed", "widened")}

    def squares(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        notes.add("measure", bucket=notes.shards[x.data_ptr()])
        return real["squares"](x, dtype)

    def narrowed(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if whole.dtype != dtype:
            notes.add("narrow", bytes=whole.nbytes)
        with _counted(notes):
            return real["narrowed"](whole, dtype)

    def widened(whole: torch.Tensor, dtype: torch.dtype, part: range) -> None:
        if whole.dtype != dtype:
            notes.add("widen", bytes=len(part) * whole.itemsize)
        with _counted(notes):
            real["widened"](whole, dtype, part)

    return {"squares": squares, "narrowed": narrowed, "widened": widened}


@contextmanager
def _counted(notes: _Notes) -> Iterator[None]:
    notes.inside += 1
    yield
    notes.inside -= 1


def _watched(notes: _Notes) -> type[torch.Tensor]:
    """Gradients of a shard that lie apart: what is written or added to all of them is a sum that has landed."""

    class Shard(torch.Tensor):
        def copy_(self, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            _landed(notes, self, "write")
            return super().copy_(x, non_blocking)

        def add_(self, x: Any, alpha: float = 1) -> torch.Tensor:
            _landed(notes, self, "add")
            return super().add_(x, alpha=alpha)

    return Shard


def _landed(notes: _Notes, x: torch.Tensor, way: str) -> None:
    if not notes.inside:
        notes.add("wait_reduce_scatter", way, bucket=notes.shards[x.data_ptr()])


@dataclass
class _Moving:
    """An optimizer that says which bucket it moves."""

    real: AdamW
    notes: _Notes

    @property
    def nonfinite(self) -> torch.Tensor:
        return self.real.nonfinite

    @property
    def step(self) -> torch.Tensor:
        return self.real.step

    def factors(self, squared_norm: torch.Tensor) -> Any:
        return self.real.factors(squared_norm)

    def update(self, flat: Any, factors: Any) -> None:
        bucket = self.notes.buckets[id(flat.bucket)]
        self.notes.add("update", bucket=bucket, bytes=flat.own_gradient.nbytes)
        with _counted(self.notes):
            self.real.update(flat, factors)

    def end(self, *said: Any) -> None:
        self.notes.add("end")
        self.real.end(*said)


# Positions are data, of which there is none: heads are not turned.
STILL = Fp8Kernels(TORCH, emulated, lambda *about: None).table()

# ---- kernels and registers ----------------------------------------------------------------------------------------


def _bodies(notes: _Notes) -> dict[str, TorchKernel]:
    """Those of every op: they say what is asked, and do nothing but what the host or the wire must see of them."""

    def kernel(op_name: str, phase: str) -> Any:
        def said(env: Env, site: Site, ins: Any, weights: Any, last: Any, *more: Any) -> None:
            notes.add("kernel", op_name, phase=phase, line=site.line)
            if op_name == "split_sizes":
                last[0] = _sizes(site)
            elif site.attrs.get("fp8"):  # its kernel agrees with other ranks on scales
                real = getattr((REFERENCE | STILL)[op_name], phase)
                real(env, site, ins, weights, last, *more)

        return said

    phases = ("forward", "input_gradient", "weight_gradient")
    return {
        op_name: TorchKernel(*[kernel(op_name, phase) if getattr(made, phase) else None for phase in phases])
        for op_name, made in REFERENCE.items()
    }


def _sizes(site: Site) -> Splits:
    ranks, experts = int(site.attrs["ranks"]), int(site.ins[0].shape[0])  # type: ignore[arg-type]
    table = [[ROWS] * (experts // ranks) for _ in range(ranks)]
    return Splits([sum(t) for t in table], [sum(t) for t in table], table)


class _Zeros(Fresh):
    def new(self, spec: Spec) -> torch.Tensor:
        return super().new(spec).zero_()


class _Nothing(dict[str, torch.Tensor]):
    """Data: kernels do not read it."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.zeros(0)

"""Where every register of a step lies in one block of memory: planned once, so addresses repeat from step to step."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from penteract.ops.spec import Received, Spec
from penteract.ops.tape import Call
from penteract.schedule.actions import Compute, Exchange, Transfer, Woven
from penteract.step.program import Program, Slot
from penteract.step.walk import walk, walk_forward
from penteract.units import Bytes

ALIGNMENT = 512  # of a register's first byte: what kernels with wide loads ask for


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """`offsets[i]`: the place of the step's i-th new register; None: routing decides its size, it lies elsewhere."""

    size: Bytes
    offsets: tuple[Bytes | None, ...]


@dataclass(slots=True)
class _Planning:
    """The reading that plans: registers are intervals, the lowest gap that fits is taken."""

    p: Program
    offsets: list[Bytes | None] = field(default_factory=list["Bytes | None"])
    taken: list[tuple[Bytes, Bytes]] = field(default_factory=list[tuple[Bytes, Bytes]])  # (begin, end), ascending
    place: dict[tuple[Slot, int], tuple[Bytes, Bytes]] = field(
        default_factory=dict[tuple[Slot, int], tuple[Bytes, Bytes]]
    )
    size: Bytes = 0

    def begin(self) -> None: ...

    def call(self, slot: Slot, call: Call) -> None:
        for r in call.outs:
            self._new(slot, r)

    def exchange(self, transfers: tuple[tuple[Transfer, Slot, int], ...]) -> None:
        for t, slot, r in transfers:
            if t.kind == "Recv":
                self._new(slot, r)

    def free(self, slot: Slot, registers: tuple[int, ...]) -> None:
        for r in registers:
            if (interval := self.place.pop((slot, r), None)) is not None:
                self.taken.remove(interval)

    def settle(self) -> None: ...
    def reduce(self, bucket: int) -> None: ...
    def after(self, action: Compute | Woven | Exchange) -> None: ...
    def gradients(self) -> None: ...
    def update(self, bucket: int) -> None: ...
    def end(self) -> None: ...

    def _new(self, slot: Slot, register: int) -> None:
        spec = self.p.chunks[slot[0]].specs[register]
        if spec.role == "host":
            return
        if not _planned(spec):
            self.offsets.append(None)
            return
        n = max(1, -(-spec.numel() * self.p.widths[spec.role] // ALIGNMENT)) * ALIGNMENT
        at = 0
        for begin, end in self.taken:
            if begin - at >= n:
                break
            at = end
        self.place[slot, register] = (at, at + n)
        insort(self.taken, (at, at + n))
        self.offsets.append(at)
        self.size = max(self.size, at + n)


def _planned(spec: Spec) -> bool:
    return not any(isinstance(d, Received) for d in spec.shape)


def plan_arena(p: Program, *, training: bool = True) -> ArenaPlan:
    """Walk the step once and give every register its place."""
    planning = _Planning(p)
    (walk if training else walk_forward)(p, planning)
    return ArenaPlan(planning.size, tuple(planning.offsets))

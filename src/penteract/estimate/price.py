"""The price of one rank's step: bytes on every wire, FLOPs, and the bytes alive at every moment of the walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from penteract.estimate.load import Balanced, Load
from penteract.ops.bodies import BODIES
from penteract.ops.collectives import counted
from penteract.ops.spec import Spec, size
from penteract.ops.tape import Call, Site
from penteract.schedule.actions import Compute, Exchange, Transfer, Woven
from penteract.step.arena import plan_arena
from penteract.step.program import Program, Slot
from penteract.step.walk import walk
from penteract.units import Bytes, Flops

Wire = tuple[str, tuple[int, ...]]  # collective, the ranks of its group


@dataclass(slots=True)
class Price:
    """What a step takes on one rank. All of it is exact: counted from the program.

    `resident`  bytes by kind that stay from step to step; `peak` is the most alive at once beside them
    `kept`      bytes alive after each action, in the order of the walk
    `routed`    the most that registers of routed size take, outside the arena; modelled where the load is
    `arena`     the block in which registers get fixed places; `workspace` what one body allocates beside it at most
    """

    wires: Counter[Wire] = field(default_factory=Counter[Wire])
    flops: Counter[str] = field(default_factory=Counter[str])
    resident: dict[str, Bytes] = field(default_factory=dict[str, Bytes])
    kept: list[tuple[str, Bytes]] = field(default_factory=list[tuple[str, Bytes]])
    peak: Bytes = 0
    arena: Bytes = 0
    workspace: Bytes = 0
    routed: Bytes = 0
    peak_at: str = ""

    @property
    def live(self) -> Bytes:
        """The most bytes of tensors that live at once when every register has a storage of its own."""
        return sum(self.resident.values()) + self.peak

    @property
    def allocated(self) -> Bytes:
        """The most bytes of tensors at once in training, where registers lie in the arena: never less than `live`."""
        return sum(self.resident.values()) + self.arena + self.routed + self.workspace

    @property
    def total_flops(self) -> Flops:
        return sum(self.flops.values())


@dataclass(slots=True)
class _Pricing:
    """The reading that prices: registers are sizes."""

    p: Program
    load: Load
    price: Price = field(default_factory=Price)
    alive: dict[tuple[Slot, int], Bytes] = field(default_factory=dict[tuple[Slot, int], Bytes])
    now: Bytes = 0
    routed: Bytes = 0  # of `now`, in registers whose size is data

    # ---- the walk --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._reduce_over("dp", self.p.widths["index"])

    def call(self, slot: Slot, call: Call) -> None:
        site, specs = call.site, self.p.chunks[slot[0]].specs
        if call.phase == "finish":
            return
        for r in call.outs:
            self._hold(slot, r, self._bytes(specs[r], slot))
        if call.phase == "start":
            wire = counted(site.word, site.ins[0], site.outs[0])
            self._wire(site.word, self.p.mesh.group(str(site.attrs["axis"]), self.p.rank), self._bytes(wire, slot))
            return
        ins = [tuple(self._size(d, slot) for d in s.shape) for s in site.ins]
        body = BODIES[site.word]
        self.price.flops[call.phase] += body.flops(call.phase, ins, site.weights, site.attrs)
        self._note(body.workspace(call.phase, ins, site.weights, site.attrs, self.p.widths), site)

    def free(self, slot: Slot, registers: tuple[int, ...]) -> None:
        for r in registers:
            amount = self.alive.pop((slot, r))
            self.now -= amount
            self.routed -= amount * self._is_routed(slot, r)

    def exchange(self, transfers: tuple[tuple[Transfer, Slot, int], ...]) -> None:
        for t, slot, r in transfers:
            amount = self._bytes(self.p.chunks[slot[0]].specs[r], slot)
            if t.kind == "Recv":
                self._hold(slot, r, amount)
            ends = (self.p.rank, self.p.mesh.neighbour(self.p.rank, t.peer))
            self.price.wires[t.kind.lower(), ends] += amount
        self._note(0, None)

    def settle(self) -> None: ...

    def reduce(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if len(b.holders) > 1:
            self.price.wires["all_reduce", b.holders] += b.size * self.p.widths["stat"]

    def after(self, action: Compute | Woven | Exchange) -> None:
        self.price.kept.append((str(action), self.now))

    def gradients(self) -> None:
        if self.p.balanced and self.p.model.moe is not None:
            self._reduce_over("stage", len(self.p.balanced) * self.p.model.moe.experts * self.p.widths["index"])
        self._reduce_over("world", (2 + len(self.p.losses)) * self.p.widths["stat"])

    def update(self, bucket: int) -> None:
        """AdamW works in place but for one temporary of the bucket's size."""
        self._note(self.p.buckets[bucket].size * self.p.widths["stat"], None)

    def end(self) -> None:
        assert not self.alive, "registers outlive the step"

    # ---- counting --------------------------------------------------------------------------------------------

    def _size(self, dim: object, slot: Slot) -> int:
        return size(dim, lambda layer: self.load.received(layer, slot[1]))  # type: ignore[arg-type]

    def _bytes(self, spec: Spec, slot: Slot) -> Bytes:
        return spec.numel(lambda layer: self.load.received(layer, slot[1])) * self.p.widths[spec.role]

    def _wire(self, kind: str, group: tuple[int, ...], amount: Bytes) -> None:
        """A shift is a send to the next of the ring and a receive from the one before."""
        if kind == "shift":
            me = group.index(self.p.rank)
            self.price.wires["send", (self.p.rank, group[(me + 1) % len(group)])] += amount
            self.price.wires["recv", (self.p.rank, group[me - 1])] += amount
        else:
            self.price.wires[kind, group] += amount

    def _hold(self, slot: Slot, register: int, amount: Bytes) -> None:
        self.alive[slot, register] = amount
        self.now += amount
        self.routed += amount * self._is_routed(slot, register)
        self.price.routed = max(self.price.routed, self.routed)

    def _is_routed(self, slot: Slot, register: int) -> bool:
        return any(not isinstance(d, int) for d in self.p.chunks[slot[0]].specs[register].shape)

    def _note(self, workspace: Bytes, site: Site | None) -> None:
        self.price.workspace = max(self.price.workspace, workspace)
        if self.now + workspace > self.price.peak:
            self.price.peak, self.price.peak_at = self.now + workspace, str(site or "the update")

    def _reduce_over(self, axis: str, amount: Bytes) -> None:
        if self.p.mesh.size(axis) > 1:
            self.price.wires["all_reduce", self.p.mesh.group(axis, self.p.rank)] += amount


def price(p: Program, load: Load | None = None) -> Price:
    """Price a compiled step. `load`: how tokens spread over experts, balanced by default."""
    reading = _Pricing(p, load or Balanced.of(p))
    walk(p, reading)
    reading.price.resident = resident(p)
    reading.price.arena = plan_arena(p).size
    return reading.price


def resident(p: Program) -> dict[str, Bytes]:
    """Bytes by kind that a rank holds between steps."""
    n, w = sum(b.size for b in p.buckets), p.widths
    master = n * w["stat"] if w["compute"] < w["stat"] else 0
    kinds = {"parameters": n * w["compute"], "gradients": n * w["stat"], "optimizer": 2 * n * w["stat"] + master}
    return kinds | {"data": sum(_data(p))}


def _data(p: Program) -> Iterator[Bytes]:
    """Micro-batches of the step, and token indices that never change."""
    micros = p.layout.gradient_accumulation_steps
    seen = {name: c.tape.specs[v] for c in p.chunks for name, v in c.tape.inputs.items()}
    for name, spec in seen.items():
        copies = 1 if name.startswith("index") else micros
        yield prod(spec.shape) * copies * p.widths[spec.role]  # type: ignore[arg-type]

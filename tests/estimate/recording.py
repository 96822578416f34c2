"""The walk's own order: a reading that writes down what it is asked, as names that a clock's ops carry."""

from __future__ import annotations

from typing import Any

from penteract.ops.bodies import body_of
from penteract.ops.tape import Call
from penteract.step.program import Program, Slot
from penteract.step.walk import walk

Seen = tuple[Any, ...]


class Recording:
    """Names of all that a step does, in order. `compute`, `start` (with the ranks) and `wait`."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.seen: list[Seen] = []
        self.summing: dict[int, None] = {}

    def begin(self) -> None:
        coded = [b for b in self.p.buckets if b.gathered_as == "code"]
        self.seen += [("compute", "largest weights")] * len(coded)
        if coded:
            self._agree("stage", "scales of codes")

    def call(self, slot: Slot, call: Call) -> None:
        site, name = call.site, f"{call.phase} {call.site}"
        if call.phase == "finish":
            self.seen.append(("wait", name))
        elif call.phase == "start":
            axis = site.attrs.get("axis")
            self.seen.append(("start", name, self._ranks(str(axis)) if axis else site.word))
        else:
            ins = [tuple(d if isinstance(d, int) else 0 for d in s.shape) for s in site.ins]
            axis, n = body_of(site, self.p.layout).agreed(call.phase, ins, site.weights, site.attrs)
            if n and self.p.mesh.size(axis) > 1:
                self.seen += [("start", f"largest {name}", self._ranks(axis)), ("wait", name)]
            self.seen.append(("compute", name))

    def free(self, slot: Slot, registers: tuple[int, ...]) -> None: ...

    def exchange(self, transfers: Any) -> None:
        self.seen.append(("exchange",))

    def settle(self) -> None: ...
    def after(self, action: Any) -> None: ...
    def open(self, bucket: int) -> None: ...

    def need(self, bucket: int) -> None:
        self.seen.append(("wait", "wait parameters"))

    def gather(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if b.gathered_as == "code":
            self.seen.append(("compute", "code"))
        self.seen.append(("start", "all_gather parameters", b.sharers, b.size))

    def reduce(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if len(b.holders) == 1:
            return
        self._narrow("narrow gradients")
        kind, ranks = ("reduce_scatter", b.sharers) if b.shards > 1 else ("all_reduce", b.replicas)
        self.seen.append(("start", f"{kind} gradients", ranks, b.size))
        self.summing[bucket] = None

    def land(self, bucket: int) -> None:
        self.seen += [("wait", "wait gradients"), ("compute", "add gradients")]
        del self.summing[bucket]

    def replicate(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        self.seen.append(("start", "all_reduce shards", b.replicas, b.size))
        self.summing.pop(bucket, None)
        self.summing[bucket] = None

    def gradients(self) -> None:
        for _ in self.summing:
            self.seen.append(("wait", "wait gradients"))
            self._narrow("widen gradients")
        if self.p.balanced:
            self._agree("stage", "routed counts")
        if self.p.delayed:
            self._agree("stage", "delayed scales")
        self.seen += [("compute", "squares")] * len(self.p.buckets)

    def update(self, bucket: int) -> None:
        self.seen.append(("compute", "update"))

    def end(self) -> None: ...

    def _narrow(self, name: str) -> None:
        if self.p.precision.reduce != self.p.precision.gradient:
            self.seen.append(("compute", name))

    def _agree(self, axis: str, name: str) -> None:
        if len(ranks := self._ranks(axis)) > 1:
            self.seen += [("start", f"all_reduce {name}", ranks), ("wait", name)]

    def _ranks(self, axis: str) -> tuple[int, ...]:
        return self.p.mesh.group(axis, self.p.rank)


def recorded(p: Program) -> list[Seen]:
    """What a step of a compiled program does."""
    reading = Recording(p)
    walk(p, reading)
    return reading.seen

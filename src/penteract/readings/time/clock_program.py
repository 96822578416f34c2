"""The program of a pipeline rank for the clock: its units in order, the ops of each layer, the buckets that each reads
and writes, and the copies that run during a neighbouring unit. Equal layers in equal circumstances are one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from penteract.parallel.data import Bucket
from penteract.readings.buckets.listed import ListedPlans
from penteract.readings.layers.layer_program import LayerProgram, LayerType
from penteract.readings.layers.touches import NEVER
from penteract.readings.time.clock import WAIT, Op
from penteract.readings.time.ops import ActionOps, BucketOps
from penteract.readings.time.rank_clock import Clock, PlacedSegment
from penteract.step.all_reduces import OutsideTape
from penteract.step.fsdp import FsdpRule, UnitReads

PassKey = tuple[str, int]  # kind of an action, chunk
At = tuple[int, int]  # index of a unit in its action, position of an instruction
Inserted = Sequence[tuple[int, int, int]]  # position, before it (0) or after (1), number of bucket ops
_NO_OPS = ActionOps((), (), (), 0)


class Cut(NamedTuple):
    """The fields of a bucket that `FsdpRule` uses."""

    unit: int
    cut_parameters: bool
    cut_gradients: bool
    shards: int
    replicate_ranks: tuple[int, ...]


class Pass(NamedTuple):
    """One kind of action of a chunk.

    units       in the order in which it computes them
    unit_reads  the input of `FsdpRule`; `turns`: the units whose sharded parameters are read
    reads       where buckets that are gathered after the update are first read; `writes`: where each is last written
    lent        copies of other units that run during a unit, by its index; `whole`: units that wait for their own
                copies, too
    arrives     where the first unit reads the message from another stage, or `NEVER`
    """

    units: Sequence[int]
    unit_reads: UnitReads
    turns: tuple[int, ...]
    reads: Mapping[int, At]
    writes: Mapping[int, At]
    lent: Mapping[int, tuple[Op, ...]]
    whole: frozenset[int]
    arrives: int


@dataclass(slots=True, eq=False)
class ClockProgram:
    """One rank's program.

    layer_types   the types of its units, in the order of forward; `chunks`: the units of each chunk
    layers        of each type: the layer program, and its ops by action
    packed        the bucket plans of each of `buckets`; equal buckets are one object
    depth         units in the ring buffer of parameters
    outside       the inputs of its work outside of the tape
    offloads      whether activations are kept on the host
    """

    clock: Clock
    ops: BucketOps
    layer_types: Sequence[LayerType]
    chunks: Sequence[range]
    layers: Mapping[LayerType, tuple[LayerProgram, Mapping[str, ActionOps]]]
    packed: ListedPlans
    buckets: Sequence[Bucket]
    depth: int
    outside: OutsideTape
    offloads: bool
    rule: FsdpRule = field(init=False)
    alike: Sequence[int] = field(init=False)  # of each bucket: the first one that is the same object
    summed: list[bool] = field(init=False)  # of each bucket: whether its gradients are summed over ranks
    cut_parameters: list[bool] = field(init=False)  # of each bucket: whether it is gathered for each use
    awaited: list[bool] = field(init=False)  # of each bucket: whether it is gathered after the update
    gathered: dict[int, tuple[int, int]] = field(init=False)  # buckets gathered by unit: unit, number in the unit
    _passes: dict[PassKey, Pass] = field(default_factory=dict[PassKey, Pass])
    _rows: dict[PassKey, Sequence[PlacedSegment]] = field(default_factory=dict[PassKey, "Sequence[PlacedSegment]"])
    _segments: dict[Any, int] = field(default_factory=dict[Any, int])
    bucket_ops: list[tuple[Op, ...]] = field(default_factory=list[tuple[Op, ...]])  # by their number
    places: dict[Any, Any] = field(default_factory=dict[Any, Any])  # caches of `derive.py`
    derived: dict[Any, Any] = field(default_factory=dict[Any, Any])
    outside_ops: dict[tuple[str, int], tuple[Op, ...]] = field(default_factory=dict[tuple[str, int], tuple[Op, ...]])

    def __post_init__(self) -> None:
        """Make the FSDP rule of the buckets, and ask the distinct ones."""
        cuts = [
            Cut(plan.unit, b.cut_parameters, b.cut_gradients, b.shards, b.replicate_ranks)
            for plan, b in zip(self.packed.plans, self.buckets, strict=True)
        ]
        self.rule = FsdpRule(cuts, self.depth)
        self.alike = self.packed.alike
        first = dict.fromkeys(self.alike)
        self.summed = self._of_each(first, lambda b: b.summed)
        self.cut_parameters = self._of_each(first, lambda b: b.cut_parameters)
        self.awaited = self._of_each(first, lambda b: b.gathered_after_update)
        self.gathered = {b: (unit, i) for unit, own in self.rule.cut.items() for i, b in enumerate(own)}

    def _of_each(self, distinct: Iterable[int], ask: Callable[[Bucket], bool]) -> list[bool]:
        """An answer of each bucket; only the `distinct` ones are asked."""
        answers = {b: ask(self.buckets[b]) for b in distinct}
        return [answers[b] for b in self.alike]

    def walk(self, walk: PassKey) -> Pass:
        """The pass of a kind of action through a chunk."""
        if (found := self._passes.get(walk)) is None:
            kind, chunk = walk
            units = self.chunks[chunk] if kind == "Fwd" else self.chunks[chunk][::-1]
            found = self._passes[walk] = self._pass(kind, units)
        return found

    def _pass(self, action: str, units: Sequence[int]) -> Pass:
        cut, awaited = self.cut_parameters, self.awaited
        turns: list[tuple[At, int]] = []
        reads: dict[int, At] = {}
        first: dict[int, At] = {}
        last: dict[int, At] = {}
        types = [self.layer_types[unit] for unit in units]
        touches = {kind: self.layers[kind][0].touches(action) for kind in types}
        for k, unit in enumerate(units):
            turn, of = NEVER, self.packed.of[unit]
            for name, read, written, until in touches[types[k]].params:
                b = of[name]
                if read != NEVER:
                    if cut[b]:
                        turn = read if turn == NEVER or read < turn else turn
                    elif awaited[b] and (b not in reads or reads[b] >= (k, read)):
                        reads[b] = (k, read)
                if written != NEVER:
                    if b not in last:
                        first[b], last[b] = (k, written), (k, until)
                        continue
                    if (k, written) < first[b]:
                        first[b] = (k, written)
                    if (k, until) > last[b]:
                        last[b] = (k, until)
            if turn != NEVER:
                turns.append(((k, turn), unit))
        begun = sorted([(at, b) for b, at in first.items() if self.buckets[b].cut_gradients])
        writes = [(at, b, last[b]) for at, b in begun]
        attention = [(k, at) for k, kind in enumerate(types) for at in touches[kind].attention]
        unit_reads = UnitReads(turns, writes, attention, self.rule.reused(writes))
        return Pass(units, unit_reads, tuple([unit for _, unit in turns]), reads, last, *self._lent(units, action),
                    self.layers[self.layer_types[units[0]]][0].reads_message(action))  # fmt: skip

    # ---- segments --------------------------------------------------------------------------------------------

    def row(self, walk: PassKey) -> Sequence[PlacedSegment]:
        """The segments of a pass without bucket events."""
        if (found := self._rows.get(walk)) is None:
            through = self.walk(walk)
            found = self._rows[walk] = [self.placed(through, walk[0], k) for k in range(len(through.units))]
        return found

    def placed(
        self, through: Pass, action: str, k: int, inserted: Inserted = (), needs: tuple[int, ...] = ()
    ) -> PlacedSegment:
        """The segment of the k-th unit of a pass, with bucket ops inserted. `needs`: buckets that it waits for."""
        unit = through.units[k]
        key = (self.layer_types[unit], action, tuple(inserted), through.lent.get(k, ()), k in through.whole)
        if (found := self._segments.get(key)) is None:
            found = self._segments[key] = self._segment(*key)
        return found, unit, needs

    def _segment(
        self, kind: LayerType, action: str, inserted: Inserted, lent: tuple[Op, ...], whole: bool
    ) -> int:  # fmt: skip
        """The segment of a unit's calls, with bucket ops inserted, and the copies of its neighbours (`lent`).

        whole  it waits for all of its own copies, too
        """
        own = self._ops_of(kind, action)
        calls = own.every if whole else own.own
        # The copies come first, or in a forward before its last calls; then what is inserted at the same place.
        more = [(own.last if action == "Fwd" else 0, -1, lent)] if lent else []
        more += [(pos, when, self.bucket_ops[number]) for pos, when, number in inserted]
        ops, at = list[Op](), 0
        for pos, when, some in sorted(more, key=itemgetter(0, 1)):
            until = pos + max(when, 0)
            for call in calls[at:until]:
                ops += call
            ops += some
            at = until
        for call in calls[at:]:
            ops += call
        return self.clock.segment(tuple(ops))

    def _lent(self, units: Sequence[int], action: str) -> tuple[Mapping[int, tuple[Op, ...]], frozenset[int]]:
        """Copies to and from the host that run during another unit, by its index; and the units that wait for their own
        copies to the host: only the last."""
        if not self.offloads:
            return {}, frozenset()
        moved = [self._ops_of(self.layer_types[unit], action).moved for unit in units]
        having = [k for k, some in enumerate(moved) if some]
        alone = action == "Fwd" and having[-1:] == [len(units) - 1]
        if action == "Fwd":  # waited for at the end of the next unit with copies, or of the pass
            pairs = [*pairwise(having), *((k, len(units) - 1) for k in having[-1:] if not alone)]
        else:  # the first copy from the host starts at once
            pairs = zip(having, (0, *having), strict=False)
        lent = defaultdict[int, tuple[Op, ...]](tuple)
        for of, to in pairs:
            lent[to] += tuple([_renamed(op, units[of] - units[to]) for op in moved[of]])
        return lent, frozenset(having[-1:] if alone else ())

    def _ops_of(self, kind: LayerType, action: str) -> ActionOps:
        return self.layers[kind][1].get(action, _NO_OPS)


def _renamed(op: Op, away: int) -> Op:
    """An op of another unit, with the key seen from this one."""
    place = 1 if op[0] == WAIT else 3
    op_name, unit, number = op[place]
    return (*op[:place], (op_name, unit + away, number), *op[place + 1 :])

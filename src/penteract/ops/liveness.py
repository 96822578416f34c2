"""Which values of a tape are kept and which are recomputed, without lowering it; and which sets of ops to recompute
have different results.

A value that backward reads is kept, or recomputed if its op is in the set. A recomputed op's own inputs are then kept
or recomputed in the same way. An op whose results nobody needs changes nothing. So the sets that differ are those in
which every op is really recomputed. All of them are found by starting from the empty set and adding ops whose results
are still kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.ops.lower import ONCE, lower
from penteract.ops.tape import OpCall, Tape

Ops = frozenset[str]


class Liveness(NamedTuple):
    """The kept registers that recomputation could drop, and the ops that are recomputed."""

    kept: frozenset[int]
    again: frozenset[OpCall]


@dataclass(frozen=True, slots=True)
class LivenessAnalysis:
    """Liveness of a tape. `needs`: the forward's values that backward reads; `root`: result of a fork -> its input;
    `whole`: of what makes one result of an op again (`OpCall.again`), that op, which makes it too."""

    needs: frozenset[int]
    producer: dict[int, OpCall]  # of the values that recomputation could drop
    root: dict[int, int]
    whole: dict[OpCall, OpCall]

    @staticmethod
    def of(tape: Tape) -> LivenessAnalysis:
        """Lower a tape once, without recomputation, and note what its backward reads and which ops make it."""
        root: dict[int, int] = {}
        producer: dict[int, OpCall] = {}
        whole: dict[OpCall, OpCall] = {}
        for op in tape.ops:
            if op.site.op_name == "fork":
                root |= dict.fromkeys(op.outs, root.get(op.ins[0], op.ins[0]))
            elif op.site.op_name not in ONCE:
                producer |= {r: op.again_for(r) or op for r in (*op.outs, *op.extras)}
                if op.again is not None:
                    whole[op.again] = op
            if op.passed is not None:
                root[op.passed] = root.get(op.ins[0], op.ins[0])
        for entry in tape.layer_inputs:
            producer.pop(root.get(entry, entry), None)
        actions = lower(tape).actions
        reads = {r for name, some in actions.items() if name != "Fwd" for i in some for r in i.call.ins}
        return LivenessAnalysis(frozenset(reads & producer.keys()), producer, root, whole)

    def __call__(self, op_names: Ops) -> Liveness:
        """What is kept and what is recomputed if the ops of these names are to be recomputed."""
        kept, again, waiting, seen = set[int](), set[OpCall](), list(self.needs), set(self.needs)
        while waiting:
            r = waiting.pop()
            op = self.producer[r]
            if op in self.whole and self.whole[op].name in op_names:
                op = self.whole[op]
            if op.name not in op_names:
                kept.add(r)
            elif op not in again:
                again.add(op)
                more = {self.root.get(v, v) for v in op.ins} & self.producer.keys() - seen
                seen |= more
                waiting += more
        return Liveness(frozenset(kept), frozenset(again))


Table = tuple[tuple[Ops, tuple[Liveness, ...]], ...]  # sets of ops, and each one's liveness on every tape


def groups(tapes: Sequence[LivenessAnalysis], always: Iterable[str] = ()) -> Iterator[Table]:
    """Tables of independent groups of ops. Any choice of one set from each table is a set of ops; what it keeps and
    recomputes is the union of what the chosen sets keep and recompute. The ops of `always` are in every set.

    An op depends on another if only its recomputation needs a result of the other.
    """
    first = frozenset(always)
    plain = tuple(tape(first) for tape in tapes)
    group_of: dict[str | OpCall, set[str | OpCall]] = {}  # an op of `always` is grouped call by call, others by name
    for tape, lives in zip(tapes, plain, strict=True):
        needed = lives.kept | {r for op in lives.again for r in (*op.outs, *op.extras)}
        for op in {*tape.producer.values()}:
            read = {tape.root.get(v, v) for v in op.ins} & tape.producer.keys() - needed
            whole = [tape.whole[op]] if op in tape.whole else []
            together = {o if o.name in first else o.name for o in (op, *whole, *(tape.producer[r] for r in read))}
            for other in [group_of[op_name] for op_name in together if op_name in group_of]:
                together |= other
            group_of |= dict.fromkeys(together, together)
    for group in {id(g): g for g in group_of.values()}.values():
        table = tuple(_sets(tapes, first, {op_name for op_name in group if isinstance(op_name, str)}))
        if len(table) > 1:
            yield table


def _sets(
    tapes: Sequence[LivenessAnalysis], always: Ops, group: set[str]
) -> Iterator[tuple[Ops, tuple[Liveness, ...]]]:
    """Every set of a group's ops whose result differs from all others."""
    seen, waiting = {frozenset[str]()}, [frozenset[str]()]
    while waiting:
        op_names = waiting.pop()
        lives_of = tuple(_within(tape, tape(always | op_names), group) for tape in tapes)
        yield op_names, lives_of
        for more in {tape.producer[r].name for tape, lives in zip(tapes, lives_of, strict=True) for r in lives.kept}:
            if (larger := op_names | {more}) not in seen:
                seen.add(larger)
                waiting.append(larger)


def _within(tape: LivenessAnalysis, lives: Liveness, group: set[str]) -> Liveness:
    """The part of `lives` that belongs to the ops of `group`."""
    kept = frozenset(r for r in lives.kept if tape.producer[r].name in group)
    return Liveness(kept, frozenset(op for op in lives.again if op.name in group))

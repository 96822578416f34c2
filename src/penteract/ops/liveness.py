"""What becomes of the values of a tape when ops are recomputed, without lowering it; and which sets of ops differ.

A value that backward reads is kept, or made again if its op is recomputed; then what that op reads is kept or made
again in its turn. An op none of whose results is asked for changes nothing. So the sets that differ are those of which
every op makes something again, and all of them are found by adding, to one of them, an op of what it still keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.ops.lower import ONCE, lower
from penteract.ops.tape import OpCall, Tape

Ops = frozenset[str]


class Liveness(NamedTuple):
    """Registers that are kept and that recomputing could drop, and the ops that are made again."""

    kept: frozenset[int]
    again: frozenset[OpCall]


@dataclass(frozen=True, slots=True)
class LivenessAnalysis:
    """Of a tape. `needs`: what backward reads of the forward; `root`: what the results of forks stand for."""

    needs: frozenset[int]
    producer: dict[int, OpCall]  # of what recomputing could drop
    root: dict[int, int]

    @staticmethod
    def of(tape: Tape) -> LivenessAnalysis:
        """Lower a tape once, without recomputing, and note what its backward reads and which ops make it."""
        root: dict[int, int] = {}
        producer: dict[int, OpCall] = {}
        for op in tape.ops:
            if op.site.op_name == "fork":
                root |= dict.fromkeys(op.outs, root.get(op.ins[0], op.ins[0]))
            elif op.site.op_name not in ONCE:
                producer |= dict.fromkeys((*op.outs, *op.extras), op)
            if op.passed is not None:
                root[op.passed] = root.get(op.ins[0], op.ins[0])
        for entry in tape.layer_inputs:
            producer.pop(root.get(entry, entry), None)
        actions = lower(tape).actions
        reads = {r for name, some in actions.items() if name != "Fwd" for i in some for r in i.call.ins}
        return LivenessAnalysis(frozenset(reads & producer.keys()), producer, root)

    def __call__(self, op_names: Ops) -> Liveness:
        """What is kept and what is made again where the ops of these names are recomputed."""
        kept, again, asked, seen = set[int](), set[OpCall](), list(self.needs), set(self.needs)
        while asked:
            r = asked.pop()
            op = self.producer[r]
            if op.name not in op_names:
                kept.add(r)
            elif op not in again:
                again.add(op)
                more = {self.root.get(v, v) for v in op.ins} & self.producer.keys() - seen
                seen |= more
                asked += more
        return Liveness(frozenset(kept), frozenset(again))


Table = tuple[tuple[Ops, tuple[Liveness, ...]], ...]  # sets of ops, and what each makes of every tape


def groups(tapes: Sequence[LivenessAnalysis], always: Iterable[str] = ()) -> Iterator[Table]:
    """Ops that know nothing of each other apart: a set of ops is one of each table, and what all of it keeps and
    makes again is the union of what they do. Those of `always` are in every set.

    An op hangs on another where making it again is all that asks for a result of the other.
    """
    first = frozenset(always)
    plain = tuple(told(first) for told in tapes)
    known: dict[str | OpCall, set[str | OpCall]] = {}  # an op that is in every set hangs on what each of its ops reads
    for told, fate in zip(tapes, plain, strict=True):
        asked = fate.kept | {r for op in fate.again for r in (*op.outs, *op.extras)}
        for op in {*told.producer.values()}:
            read = {told.root.get(v, v) for v in op.ins} & told.producer.keys() - asked
            together = {
                o if o.name in first else o.name for o in (op, *(told.producer[r] for r in read))
            }
            for other in [known[op_name] for op_name in together if op_name in known]:
                together |= other
            known |= dict.fromkeys(together, together)
    for group in {id(g): g for g in known.values()}.values():
        table = tuple(_sets(tapes, first, {op_name for op_name in group if isinstance(op_name, str)}))
        if len(table) > 1:
            yield table


def _sets(
    tapes: Sequence[LivenessAnalysis], always: Ops, group: set[str]
) -> Iterator[tuple[Ops, tuple[Liveness, ...]]]:
    """Every set of a group's ops that differs from all others."""
    seen, waiting = {frozenset[str]()}, [frozenset[str]()]
    while waiting:
        op_names = waiting.pop()
        lives_of = tuple(_within(told, told(always | op_names), group) for told in tapes)
        yield op_names, lives_of
        for more in {
            told.producer[r].name for told, fate in zip(tapes, lives_of, strict=True) for r in fate.kept
        }:
            if (larger := op_names | {more}) not in seen:
                seen.add(larger)
                waiting.append(larger)


def _within(told: LivenessAnalysis, fate: Liveness, group: set[str]) -> Liveness:
    """What of it is of these ops."""
    kept = frozenset(r for r in fate.kept if told.producer[r].name in group)
    return Liveness(kept, frozenset(op for op in fate.again if op.name in group))

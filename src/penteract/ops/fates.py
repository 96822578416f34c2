"""What becomes of the values of a tape when words are remade, without lowering it; and which sets of words differ.

A value that backward reads is kept, or made again if its word is remade; then what that word reads is kept or made
again in its turn. A word none of whose results is asked for changes nothing. So the sets that differ are those of which
every word makes something again, and all of them are found by adding, to one of them, a word of what it still keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.ops.lower import ONCE, lower
from penteract.ops.tape import Op, Tape

Words = frozenset[str]


class Fate(NamedTuple):
    """Registers that are kept and that remaking could drop, and the ops that are made again."""

    kept: frozenset[int]
    again: frozenset[Op]


@dataclass(frozen=True, slots=True)
class Fates:
    """Of a tape. `needs`: what backward reads of the forward; `root`: what the results of forks stand for."""

    needs: frozenset[int]
    producer: dict[int, Op]  # of what remaking could drop
    root: dict[int, int]

    @staticmethod
    def of(tape: Tape) -> Fates:
        root: dict[int, int] = {}
        producer: dict[int, Op] = {}
        for op in tape.ops:
            if op.site.word == "fork":
                root |= dict.fromkeys(op.outs, root.get(op.ins[0], op.ins[0]))
            elif op.site.word not in ONCE:
                producer |= dict.fromkeys((*op.outs, *op.extras), op)
        for anchor in tape.anchors:
            producer.pop(root.get(anchor, anchor), None)
        actions = lower(tape).actions
        reads = {r for name, some in actions.items() if name != "Fwd" for i in some for r in i.call.ins}
        return Fates(frozenset(reads & producer.keys()), producer, root)

    def __call__(self, words: Words) -> Fate:
        kept, again, asked, seen = set[int](), set[Op](), list(self.needs), set(self.needs)
        while asked:
            r = asked.pop()
            op = self.producer[r]
            if op.site.word not in words:
                kept.add(r)
            elif op not in again:
                again.add(op)
                more = {self.root.get(v, v) for v in op.ins} & self.producer.keys() - seen
                seen |= more
                asked += more
        return Fate(frozenset(kept), frozenset(again))


def sets(tapes: Sequence[Fates], always: Iterable[str] = ()) -> Iterator[tuple[Words, tuple[Fate, ...]]]:
    """Every set of words that differs from all others, with what it makes of each tape; first that of `always`, which
    are in all of them."""
    first = frozenset(always)
    seen, waiting = {first}, [first]
    while waiting:
        words = waiting.pop()
        fates = tuple(told(words) for told in tapes)
        yield words, fates
        for more in {told.producer[r].site.word for told, fate in zip(tapes, fates, strict=True) for r in fate.kept}:
            if (larger := words | {more}) not in seen:
                seen.add(larger)
                waiting.append(larger)

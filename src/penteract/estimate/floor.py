"""Bytes that a layout keeps at least, from very little: what its layers keep for each sequence of a micro-batch.

Kept registers have a dim that is so many times the micro-batch's size, so the tape that leaves that size open tells
what they grow by, without shapes or scratch of any size. Ends, constants and what routing sizes are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from penteract.estimate.composed import Composer
from penteract.estimate.pieces import ENDS, Growth, Kind
from penteract.estimate.reads import Memos, tracked
from penteract.estimate.stages import Chain
from penteract.schedule.in_flight import most_in_flight
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.spec.layout import Layout
from penteract.step.places import Span
from penteract.units import Bytes


@dataclass(slots=True)
class Floor:
    """Lower bounds of what pipeline ranks keep for micro-batches in flight."""

    composer: Composer
    memos: Memos = field(default_factory=Memos)
    known: dict[object, list[tuple[Mapping[Span, Bytes], ...]]] = field(
        default_factory=dict[object, list[tuple[Mapping[Span, Bytes], ...]]]
    )

    def per_sequence(self, layout: Layout) -> list[Bytes]:
        """Kept on the device for each sequence of a micro-batch by the fullest rank of each group with the same
        stages."""
        schedule, micros = schedule_of(layout.schedule), layout.gradient_accumulation_steps
        if schedule.alternates:  # then no more are in flight
            micros = min(micros, schedule.steady_after(layout.pp, layout.vpp))
        return self._per_sequence(layout, micros)

    @tracked
    def _per_sequence(self, layout: Layout, micros: int) -> list[Bytes]:
        groups = zip(self.composer.deal(layout).alike, self._growth(layout), strict=True)
        return [max(_in_flight(layout, micros, ranks, chunks)) for ranks, chunks in groups]

    def _growth(self, layout: Layout) -> list[tuple[Mapping[Span, Bytes], ...]]:
        """By group of ranks and chunk, what each micro-batch keeps for each of its sequences."""
        deal = self.composer.deal(layout)
        layers = [kind for kind in deal.kinds if kind not in ENDS]
        each = {kind: self.composer.recorder.growth(layout, kind) for kind in layers}
        key = (deal, *each.values())
        if key not in self.known:
            self.known[key] = deal.dealt([_of_chain(chain, each) for chain in deal.chains])
        return self.known[key]


def _of_chain(chain: Chain, each: Mapping[Kind, Growth]) -> Mapping[Span, Bytes]:
    """Of its layers: the input of the first is that of an end, or was received."""
    total, first = dict[Span, Bytes](), True
    for kind, n in chain:
        if kind in ENDS:
            continue
        for span, amount in each[kind].own.items():
            total[span] = total.get(span, 0) + n * amount
        for span, amount in each[kind].entry.items():
            total[span] = total.get(span, 0) + (n - first) * amount
        first = False
    return total


def _in_flight(
    layout: Layout, micros: int, ranks: tuple[int, ...], chunks: Sequence[Mapping[Span, Bytes]]
) -> list[Bytes]:
    """By rank: so many at once of the chunks together, the smallest of which each is at least."""
    lay, held = layout, [0] * len(ranks)
    for span in set[Span]().union(*chunks):
        if size := min([chunk.get(span, 0) for chunk in chunks]):
            told = _of_ranks(lay.schedule, lay.pp, lay.vpp, micros, span, ranks)
            held = [n + size * number for n, number in zip(held, told, strict=True)]
    return held


@cache
def _of_ranks(
    schedule: ScheduleName, pp: int, vpp: int, micros: int, span: Span, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The most micro-batches at once inside a span of any chunk, on each of these ranks."""
    told = most_in_flight(schedule, pp, vpp, micros, tuple((c, span) for c in range(vpp)))
    return tuple(told[r] for r in ranks)

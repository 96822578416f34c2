"""Bytes that a layout keeps at least, from very little: what its layers keep for each sequence of a micro-batch.

Kept registers have a dim that is so many times the micro-batch's size, so the tape that leaves that size open tells
what they grow by, without shapes or temporary activations of any size. Ends, constants and what routing sizes are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from penteract.config.layout import Layout
from penteract.readings.composed import Composer
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD, Growth, LayerType
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.layers.stages import StageLayers
from penteract.schedule.in_flight import most_in_flight
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.step.offsets import Span
from penteract.units import Bytes

Kept = tuple[tuple[Span, Bytes], ...]  # by any chunk of a rank, for each sequence of a micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class Growths:
    """By group of ranks with the same stages, what each micro-batch keeps for each of its sequences, by span."""

    groups: tuple[Kept, ...]


@dataclass(slots=True)
class MemoryBound:
    """Lower bounds of what pipeline ranks keep for micro-batches in flight."""

    composer: Composer
    memos: Memos = field(default_factory=Memos)
    known: dict[object, Growths] = field(default_factory=dict[object, "Growths"])
    kept: dict[object, list[Bytes]] = field(default_factory=dict[object, list[Bytes]])

    def per_sequence(self, layout: Layout, growth: Growths) -> list[Bytes]:
        """Kept on the device for each sequence of a micro-batch by the fullest rank of each group with the same
        stages; `growth`: this layout's."""
        lay, schedule, micros = layout, schedule_of(layout.schedule), layout.gradient_accumulation_steps
        if schedule.alternates:  # then no more are in flight
            micros = min(micros, schedule.steady_after(lay.pp, lay.vpp))
        key = (growth, lay.schedule, lay.pp, lay.vpp, micros)
        if key not in self.kept:
            groups = zip(self.composer.assignment(lay).groups, growth.groups, strict=True)
            self.kept[key] = [max(_in_flight(lay, micros, ranks, kept)) for ranks, kept in groups]
        return self.kept[key]

    @tracked
    def growth(self, layout: Layout) -> Growths:
        """What each micro-batch keeps for each of its sequences. Layouts with the same have one object."""
        assignment = self.composer.assignment(layout)
        layers = [kind for kind in assignment.kinds if kind not in EMBEDDING_AND_HEAD]
        each = {kind: self.composer.recorder.growth(layout, kind) for kind in layers}
        key = (assignment, *each.values())
        if key not in self.known:
            chains = [_of_chain(chain, each) for chain in assignment.chains]
            self.known[key] = Growths(tuple(map(_least, assignment.by_group(chains))))
        return self.known[key]


def _of_chain(chain: StageLayers, each: Mapping[LayerType, Growth]) -> Mapping[Span, Bytes]:
    """Of its layers: the input of the first is that of an end, or was received."""
    total, first = dict[Span, Bytes](), True
    for kind, n in chain:
        if kind in EMBEDDING_AND_HEAD:
            continue
        for span, amount in each[kind].own.items():
            total[span] = total.get(span, 0) + n * amount
        for span, amount in each[kind].entry.items():
            total[span] = total.get(span, 0) + (n - first) * amount
        first = False
    return total


def _least(chunks: Sequence[Mapping[Span, Bytes]]) -> Kept:
    """Of the chunks together, the smallest of which each is at least."""
    spans = set(chunks[0]).intersection(*chunks[1:])
    return tuple([(span, min([chunk[span] for chunk in chunks])) for span in spans])


def _in_flight(layout: Layout, micros: int, ranks: tuple[int, ...], kept: Kept) -> list[Bytes]:
    """By rank: so many at once."""
    lay, held = layout, [0] * len(ranks)
    for span, size in kept:
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

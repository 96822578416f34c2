"""A cheap lower bound of activation memory: what the layers keep for each sequence of a micro-batch.

Every kept register has a dim that is a multiple of the micro-batch size. So one tape, recorded with that size open,
gives the bytes per sequence: no shapes of any particular size and no temporary activations are needed. The embedding,
the head, constants and registers of routed size are left out.
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

Kept = tuple[tuple[Span, Bytes], ...]  # at least, by each chunk of a rank, per sequence of a micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class Growths:
    """What one micro-batch keeps per sequence, by span, for each group of ranks with the same stages."""

    groups: tuple[Kept, ...]


@dataclass(slots=True)
class MemoryBound:
    """Lower bounds of what pipeline ranks keep for micro-batches in flight."""

    composer: Composer
    memos: Memos = field(default_factory=Memos)
    growths: dict[object, Growths] = field(default_factory=dict[object, "Growths"])
    kept: dict[object, list[Bytes]] = field(default_factory=dict[object, list[Bytes]])

    def per_sequence(self, layout: Layout, growth: Growths) -> list[Bytes]:
        """Bytes that the fullest rank of each group with the same stages keeps on the device, per sequence of a
        micro-batch; `growth`: that of this layout."""
        lay, schedule, num_micro_batches = layout, schedule_of(layout.schedule), layout.gradient_accumulation_steps
        if schedule.alternates:  # more micro-batches do not put more in flight
            num_micro_batches = min(num_micro_batches, schedule.steady_after(lay.pp, lay.vpp))
        key = (growth, lay.schedule, lay.pp, lay.vpp, num_micro_batches)
        if key not in self.kept:
            groups = zip(self.composer.assignment(lay).groups, growth.groups, strict=True)
            self.kept[key] = [max(_in_flight(lay, num_micro_batches, ranks, kept)) for ranks, kept in groups]
        return self.kept[key]

    @tracked
    def growth(self, layout: Layout) -> Growths:
        """What each micro-batch keeps per sequence. Equal results are one object."""
        assignment = self.composer.assignment(layout)
        layers = [kind for kind in assignment.kinds if kind not in EMBEDDING_AND_HEAD]
        each = {kind: self.composer.recorder.growth(layout, kind) for kind in layers}
        key = (assignment, *each.values())
        if key not in self.growths:
            stages = [_of_stage(chain, each) for chain in assignment.chains]
            self.growths[key] = Growths(tuple(map(_least, assignment.by_group(stages))))
        return self.growths[key]


def _of_stage(chain: StageLayers, each: Mapping[LayerType, Growth]) -> Mapping[Span, Bytes]:
    """Growth of the layers of a stage. The input of the first layer is not counted: the embedding or a receive made
    it."""
    total: dict[Span, Bytes] = {}
    first = True
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
    """By span, the least of all chunks."""
    spans = set(chunks[0]).intersection(*chunks[1:])
    return tuple([(span, min([chunk[span] for chunk in chunks])) for span in spans])


def _in_flight(layout: Layout, num_micro_batches: int, ranks: tuple[int, ...], kept: Kept) -> list[Bytes]:
    """Bytes by rank: what one micro-batch keeps times the number in flight."""
    lay, total = layout, [0] * len(ranks)
    for span, size in kept:
        counts = _of_ranks(lay.schedule, lay.pp, lay.vpp, num_micro_batches, span, ranks)
        total = [n + size * count for n, count in zip(total, counts, strict=True)]
    return total


@cache
def _of_ranks(
    schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, span: Span, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The most micro-batches at once inside a span, over all chunks, on each of these ranks."""
    counts = most_in_flight(schedule, pp, vpp, num_micro_batches, tuple((c, span) for c in range(vpp)))
    return tuple(counts[r] for r in ranks)

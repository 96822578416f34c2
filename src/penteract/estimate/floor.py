"""Bytes that a layout keeps at least, from very little: what its layers keep for each sequence of a micro-batch.

Kept registers have a dim that is so many times the micro-batch's size, so the tape that leaves that size open tells
what they grow by, without shapes or scratch of any size. Ends, constants and what routing sizes are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penteract.estimate.composed import Composer
from penteract.estimate.pieces import ENDS, Kind, Sight
from penteract.estimate.stages import Chain
from penteract.schedule.in_flight import most_in_flight
from penteract.spec.layout import Layout
from penteract.step.places import Span
from penteract.units import Bytes

_Layer = tuple[Mapping[Span, Bytes], Mapping[Span, Bytes]]  # what it keeps of its own, and its input
_Growth = tuple[tuple[Counter[Span], ...], ...]  # by group of ranks and chunk


@dataclass(slots=True)
class Floor:
    """Lower bounds of what pipeline ranks keep for micro-batches in flight."""

    composer: Composer
    _pieces: dict[tuple[Kind, Sight], _Layer] = field(default_factory=dict[tuple[Kind, Sight], "_Layer"])
    _chains: dict[tuple[Chain, Sight], Counter[Span]] = field(default_factory=dict[tuple[Chain, Sight], Counter[Span]])
    _ranks: dict[Sight, _Growth] = field(default_factory=dict[Sight, _Growth])
    _kept: dict[Sight, list[Bytes]] = field(default_factory=dict[Sight, list[Bytes]])

    def per_sequence(self, layout: Layout) -> list[Bytes]:
        """Kept on the device for each sequence of a micro-batch by the fullest rank of each group with the same
        stages."""
        lay = layout
        seen = (lay.tp, lay.cp, lay.ep, lay.expert_tp, lay.context_method if lay.cp > 1 else "", lay.attention,
                lay.edits, lay.schedule == "zb_h1")  # fmt: skip
        key = (seen, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
        if key not in self._kept:
            groups = zip(self.composer.deal(lay).alike, self._growth(lay, seen), strict=True)
            self._kept[key] = [max(_in_flight(lay, ranks, chunks)) for ranks, chunks in groups]
        return self._kept[key]

    def _growth(self, layout: Layout, seen: Sight) -> _Growth:
        key = (seen, layout.pp, layout.vpp)
        if key not in self._ranks:
            deal = self.composer.deal(layout)
            self._ranks[key] = tuple(
                tuple(self._of_chain(chain, layout, seen) for chain in deal.by_rank[ranks[0]]) for ranks in deal.alike
            )
        return self._ranks[key]

    def _of_chain(self, chain: Chain, layout: Layout, seen: Sight) -> Counter[Span]:
        if (chain, seen) in self._chains:
            return self._chains[chain, seen]
        total, first = Counter[Span](), True
        for kind, n in chain:
            if kind in ENDS:
                continue
            if (kind, seen) not in self._pieces:
                self._pieces[kind, seen] = self.composer.recorder.growth(kind, layout)
            own, entry = self._pieces[kind, seen]
            for span, amount in own.items():
                total[span] += n * amount
            for span, amount in entry.items():
                total[span] += (n - first) * amount  # the first layer's is that of an end, or was received
            first = False
        self._chains[chain, seen] = total
        return total


def _in_flight(layout: Layout, ranks: tuple[int, ...], chunks: tuple[Counter[Span], ...]) -> list[Bytes]:
    """By rank: so many at once of the chunks together, the smallest of which each is at least."""
    lay, held = layout, [0] * len(ranks)
    for span in set[Span]().union(*chunks):
        size = min(chunk[span] for chunk in chunks)
        members = tuple((c, span) for c in range(len(chunks)))
        told = most_in_flight(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, members)
        held = [n + size * told[r] for n, r in zip(held, ranks, strict=True)]
    return held

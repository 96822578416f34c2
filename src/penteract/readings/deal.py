"""Which stages the pipeline ranks of a layout have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from penteract.readings.pieces import LayerType
from penteract.readings.stages import Chain
from penteract.schedule.schedule import Placement

_T = TypeVar("_T")
Chains = tuple[Chain, ...]  # of a pipeline rank, one a chunk


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """Which chains the pipeline ranks have. Layouts that deal the same have one object.

    alike    ranks that have the same, together
    group    of each rank, its place in `alike`
    chains   each once; `chunks`: of each group, the place of each of its chains among them
    kinds    of all pieces, each once
    """

    by_rank: tuple[Chains, ...]
    alike: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]
    chains: tuple[Chain, ...]
    chunks: tuple[tuple[int, ...], ...]
    kinds: tuple[LayerType, ...]

    @staticmethod
    def of(chains: Sequence[Chain], placement: Placement) -> Deal:
        """`chains`: of each stage."""
        by_rank = tuple(tuple([chains[s] for s in own]) for own in placement.stages)
        alike: dict[Chains, list[int]] = {}
        for r, own in enumerate(by_rank):
            alike.setdefault(own, []).append(r)
        places = {own: i for i, own in enumerate(alike)}
        distinct = {chain: i for i, chain in enumerate(dict.fromkeys(chains))}
        return Deal(
            by_rank,
            tuple(map(tuple, alike.values())),
            tuple(places[own] for own in by_rank),
            tuple(distinct),
            tuple(tuple([distinct[chain] for chain in own]) for own in alike),
            tuple(dict.fromkeys(kind for chain in distinct for kind, _ in chain)),
        )

    def dealt(self, each: Sequence[_T]) -> list[tuple[_T, ...]]:
        """By group, what there is of each of its chains; `each`: of `chains`."""
        return [tuple([each[i] for i in chunks]) for chunks in self.chunks]

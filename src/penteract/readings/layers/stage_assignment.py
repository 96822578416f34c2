"""Which stages the pipeline ranks of a layout have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from penteract.readings.layers.layer_program import LayerType
from penteract.readings.layers.stages import StageLayers
from penteract.schedule.schedule import Placement

_T = TypeVar("_T")
RankLayers = tuple[StageLayers, ...]  # of a pipeline rank, one a chunk


@dataclass(frozen=True, slots=True, eq=False)
class StageAssignment:
    """Which layers the pipeline ranks have. Equal assignments are one object.

    by_rank  the layers of each rank, one chain for each model chunk
    groups   ranks with equal layers
    group    of each rank, its index in `groups`
    chains   each distinct chain of layers; `chunks`: of each group, the indices of its chains
    kinds    each distinct layer type
    """

    by_rank: tuple[RankLayers, ...]
    groups: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]
    chains: tuple[StageLayers, ...]
    chunks: tuple[tuple[int, ...], ...]
    kinds: tuple[LayerType, ...]

    @staticmethod
    def of(chains: Sequence[StageLayers], placement: Placement) -> StageAssignment:
        """Assign the stages to ranks. `chains`: the layers of each stage."""
        by_rank = tuple(tuple([chains[s] for s in own]) for own in placement.stages)
        groups: dict[RankLayers, list[int]] = {}
        for r, own in enumerate(by_rank):
            groups.setdefault(own, []).append(r)
        numbers = {own: i for i, own in enumerate(groups)}
        distinct = {chain: i for i, chain in enumerate(dict.fromkeys(chains))}
        return StageAssignment(
            by_rank,
            tuple(map(tuple, groups.values())),
            tuple(numbers[own] for own in by_rank),
            tuple(distinct),
            tuple(tuple([distinct[chain] for chain in own]) for own in groups),
            tuple(dict.fromkeys(kind for chain in distinct for kind, _ in chain)),
        )

    def by_group(self, each: Sequence[_T]) -> list[tuple[_T, ...]]:
        """For each group, the items of its chains; `each`: one item for each of `chains`."""
        return [tuple([each[i] for i in chunks]) for chunks in self.chunks]

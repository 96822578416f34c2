"""The price of a rank put together from pieces, without a walk of its step, a thousand times faster.

The numbers are the walk's, but for what routing decides: there a sum of peaks, and the walk's peak is no larger.
`tests/readings/test_composed.py` holds both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeVar

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.policy import Policy, policy
from penteract.ops.spec import Widths
from penteract.parallel.data import Bucket
from penteract.parallel.pipeline import stage_layers
from penteract.readings.buckets.planned import BucketPlanner, first_rank
from penteract.readings.layers.holdings import Holder, Holding
from penteract.readings.layers.layer_program import EMBEDDING, HEAD, LayerProgram, LayerType, Recorder, Wire
from penteract.readings.layers.pools import Pools
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.layers.stage_assignment import RankLayers, StageAssignment
from penteract.readings.layers.stages import Borders, Run, StageLayers, StageSum, add_up, borders, shown
from penteract.readings.price import away, bucket_workspace, fed, in_ring_buffers, owned
from penteract.schedule.schedule import Placement
from penteract.step import muon
from penteract.units import Bytes, Flops

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class RankPrice:
    """What a pipeline rank holds. As `Price`: resident bytes, the arena, what is routed, one declaration's
    workspace."""

    resident: Mapping[str, Bytes]
    arena: Bytes
    routed: Bytes
    workspace: Bytes
    flops: Counter[str]
    redistributions: Counter[tuple[str, str]]  # collective, axis
    host: Bytes  # beside the device

    @property
    def allocated(self) -> Bytes:
        """The most bytes of tensors on the rank's device at once."""
        return sum(self.resident.values()) + self.arena + self.routed + self.workspace


@dataclass(slots=True)
class Composer:
    """Prices ranks of layouts of one model. What two layouts show alike is recorded once, and what follows from pieces
    is kept by the pieces."""

    model: ModelSpec
    sequence_length: int
    precision: str | Policy
    optimizer_kinds: OptimizerKinds = PLAIN
    policy: Policy = field(init=False)
    widths: Widths = field(init=False)
    recorder: Recorder = field(init=False)
    holder: Holder = field(init=False)
    packer: BucketPlanner = field(init=False)
    memos: Memos = field(default_factory=Memos)
    assignments: dict[tuple[tuple[StageLayers, ...], Placement], StageAssignment] = field(
        default_factory=dict[tuple[tuple[StageLayers, ...], Placement], StageAssignment]
    )
    sums: dict[tuple[Run, ...], StageSum] = field(default_factory=dict[tuple[Run, ...], StageSum])
    borders: dict[tuple[Run, ...], Borders] = field(default_factory=dict[tuple[Run, ...], Borders])
    pooled: dict[tuple[StageSum, ...], Pools] = field(default_factory=dict[tuple[StageSum, ...], Pools])

    def __post_init__(self) -> None:
        """Resolve the policy, and make what records pieces, measures them and packs their buckets."""
        self.policy = policy(self.precision)
        self.widths = self.policy.widths
        self.recorder = Recorder(self.model, self.sequence_length, self.policy)
        self.holder = Holder(self.model, self.sequence_length, self.widths)
        self.packer = BucketPlanner(self.model, self.policy, self.optimizer_kinds, self.recorder, self.assignment)

    def piece(self, layout: Layout, kind: LayerType) -> LayerProgram:
        """The recorded program of the embedding, the head or a kind of layer, as a layout shows it."""
        return self.recorder.piece(layout, kind)

    def holding(self, layout: Layout, kind: LayerType) -> Holding:
        """What a pass through a piece takes."""
        return self.holder.measure(layout, self.recorder.piece(layout, kind))

    def stage_chains(self, layout: Layout) -> tuple[StageLayers, ...]:
        """The chain of each stage."""
        stages = layout.stages
        return tuple(
            (((EMBEDDING, 1),) if s == 0 else ())
            + self.recorder.kinds(layers, layout)
            + (((HEAD, 1),) if s == stages - 1 else ())
            for s, layers in enumerate(stage_layers(self.model.layers, stages))
        )

    def rank(self, layout: Layout, pp_rank: int) -> RankPrice:
        """Price the ranks of pipeline coordinate `pp_rank`."""
        stages, made = self.stages(layout, pp_rank), self.packer.buckets(layout, pp_rank)
        ring_buffers = self.packer.ring_buffers(layout, self.packer.runs(layout, pp_rank), pp_rank)
        inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
        beside = max(bucket_workspace(b, self.policy, layout.elementwise) for b in made)
        data = fed(inputs, layout.gradient_accumulation_steps, self.widths) + sum(s.fp8_state_bytes for s in stages)
        pools = self.pools(stages)
        [(arena, routed)], [host] = pools.activations(layout, (pp_rank,)), pools.pinned(layout, (pp_rank,))
        flops, redistributions = self.work(layout, pp_rank)
        return RankPrice(
            resident=owned(((b, 1) for b in made), self.policy) | in_ring_buffers(*ring_buffers) | {"data": data},
            arena=arena, routed=routed, workspace=max(beside, *(s.workspace for s in stages)),
            flops=flops + Counter(update=self._update(made, layout, pp_rank)), redistributions=redistributions,
            host=host + sum(away(b, self.policy) for b in made),
        )  # fmt: skip

    def _update(self, made: Iterable[Bucket], layout: Layout, pp_rank: int) -> Flops:
        """Of the first of a stage's ranks, which has the largest matrices."""
        rank = first_rank(Mesh(layout), pp_rank)
        return sum(muon.flops(b, muon.own(b, rank)) for b in made if b.optimizer_kind.by_matrix)

    def work(self, layout: Layout, pp_rank: int) -> tuple[Counter[str], Counter[Wire]]:
        """A step's FLOPs by phase, without the update, and bytes on wires."""
        each = [w for chain in self.chains_of(layout, pp_rank) for w in self._work(chain, layout)]
        return _total(layout, [flops for flops, _ in each]), _total(layout, [wires for _, wires in each])

    def _work(self, chain: StageLayers, layout: Layout) -> Iterator[tuple[Counter[str], Counter[Wire]]]:
        """FLOPs by phase and bytes on wires, of each piece of a chain."""
        for kind, n in chain:
            yield from repeat(self.recorder.work(self.piece(layout, kind), layout), n)

    def stages(self, layout: Layout, pp_rank: int) -> tuple[StageSum, ...]:
        """What the chunks of a pipeline rank sum up to. Of equal stages, it is one object."""
        return self.stages_by_group(layout)[self.assignment(layout).group[pp_rank]]

    def stages_by_group(self, layout: Layout) -> list[tuple[StageSum, ...]]:
        """The same of each group of ranks with the same stages."""
        assignment = self.assignment(layout)
        known = {kind: self.holding(layout, kind) for kind in assignment.kinds}
        return assignment.by_group(
            [self._sum(tuple([(known[kind], n) for kind, n in chain])) for chain in assignment.chains]
        )

    def _sum(self, runs: tuple[Run, ...]) -> StageSum:
        if runs not in self.sums:
            self.sums[runs] = add_up(runs, self._borders(shown(runs)))
        return self.sums[runs]

    def _borders(self, runs: tuple[Run, ...]) -> Borders:
        if runs not in self.borders:
            self.borders[runs] = borders(runs)
        return self.borders[runs]

    def pools(self, stages: tuple[StageSum, ...]) -> Pools:
        """The buffers of a rank whose chunks are `stages`."""
        if stages not in self.pooled:
            self.pooled[stages] = Pools.of(stages)
        return self.pooled[stages]

    def chains_of(self, layout: Layout, pp_rank: int) -> RankLayers:
        """The chains of one pipeline rank, one for each of its chunks."""
        return self.assignment(layout).by_rank[pp_rank]

    @tracked
    def assignment(self, layout: Layout) -> StageAssignment:
        """The chains of each pipeline rank, one a chunk."""
        key = self.stage_chains(layout), layout.placement
        return self.assignments.setdefault(key, StageAssignment.of(*key))


def _total(layout: Layout, parts: Iterable[Mapping[_Key, int]]) -> Counter[_Key]:
    """Of all micro-batches and chunks."""
    out = Counter[_Key]()
    for part in parts:
        for key, amount in part.items():
            out[key] += amount * layout.gradient_accumulation_steps
    return +out

"""The price of a rank as a sum over its layers: no walk of the step, and a thousand times faster.

The numbers equal those of the walk, except for registers whose size routing decides: there this is a sum of peaks, and
the walk's peak is no larger. `tests/readings/test_composed.py` checks both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from penteract.readings.layers.expert_load import Balanced
from penteract.readings.layers.layer_memory import LayerMemory, LayerMemoryReading
from penteract.readings.layers.layer_program import EMBEDDING, HEAD, LayerProgram, LayerType, Recorder, Wire
from penteract.readings.layers.pools import Pools
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.layers.stage_assignment import RankLayers, StageAssignment
from penteract.readings.layers.stages import (
    Borders,
    RepeatedLayer,
    StageLayers,
    StageSum,
    add_up,
    borders,
    counted,
    shortened,
)
from penteract.readings.price import (
    bucket_workspace,
    host_optimizer_bytes,
    input_bytes,
    rank_bucket_bytes,
    ring_buffer_bytes,
)
from penteract.schedule.schedule import Placement
from penteract.step import muon
from penteract.units import Bytes, Flops

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class RankPrice:
    """Memory and work of a pipeline rank. Fields as in `Price`."""

    resident: Mapping[str, Bytes]
    arena: Bytes
    routed: Bytes
    workspace: Bytes
    flops: Counter[str]
    redistributions: Counter[tuple[str, str]]  # collective, axis
    host: Bytes

    @property
    def allocated(self) -> Bytes:
        """The most bytes of tensors on the rank's device at once."""
        return sum(self.resident.values()) + self.arena + self.routed + self.workspace


@dataclass(slots=True)
class Composer:
    """Prices ranks of layouts of one model. A layer that is the same in two layouts is recorded once, and results that
    depend on the same layers are computed once.

    imbalance  rows that the experts of the fullest rank get, over the mean: for its memory. FLOPs and traffic are those
               of the mean
    """

    model: ModelSpec
    sequence_length: int
    precision: str | Policy
    optimizer_kinds: OptimizerKinds = PLAIN
    imbalance: float = 1.0
    policy: Policy = field(init=False)
    widths: Widths = field(init=False)
    recorder: Recorder = field(init=False)
    layer_memories: LayerMemoryReading = field(init=False)
    bucket_planner: BucketPlanner = field(init=False)
    memos: Memos = field(default_factory=Memos)
    assignments: dict[tuple[tuple[StageLayers, ...], Placement], StageAssignment] = field(
        default_factory=dict[tuple[tuple[StageLayers, ...], Placement], StageAssignment]
    )
    sums: dict[tuple[RepeatedLayer, ...], StageSum] = field(default_factory=dict[tuple[RepeatedLayer, ...], StageSum])
    borders: dict[tuple[RepeatedLayer, ...], Borders] = field(default_factory=dict[tuple[RepeatedLayer, ...], Borders])
    pooled: dict[tuple[StageSum, ...], Pools] = field(default_factory=dict[tuple[StageSum, ...], Pools])

    def __post_init__(self) -> None:
        """Resolve the policy. Make what records layers, measures their memory, and plans their buckets."""
        self.policy = policy(self.precision)
        self.widths = self.policy.widths
        self.recorder = Recorder(self.model, self.sequence_length, self.policy)
        self.layer_memories = LayerMemoryReading(self.model, self.sequence_length, self.widths, self.imbalance)
        self.bucket_planner = BucketPlanner(
            self.model, self.policy, self.optimizer_kinds, self.recorder, self.assignment
        )

    def load(self, layout: Layout) -> Balanced:
        """Rows that the experts of the fullest rank get."""
        return Balanced.of(self.model, layout, self.sequence_length, self.imbalance)

    def layer_program(self, layout: Layout, kind: LayerType) -> LayerProgram:
        """The program of the embedding, the head or a type of layer in a layout."""
        return self.recorder.layer_program(layout, kind)

    def layer_memory(self, layout: Layout, kind: LayerType) -> LayerMemory:
        """Memory of a pass through a layer."""
        return self.layer_memories.measure(layout, self.recorder.layer_program(layout, kind))

    def layers_by_stage(self, layout: Layout) -> tuple[StageLayers, ...]:
        """The layers of each stage, with the embedding and the head."""
        stages = layout.stages
        return tuple(
            (((EMBEDDING, 1),) if s == 0 else ())
            + self.recorder.kinds(layers, layout)
            + (((HEAD, 1),) if s == stages - 1 else ())
            for s, layers in enumerate(stage_layers(self.model.layers, layout))
        )

    def rank(self, layout: Layout, pp_rank: int) -> RankPrice:
        """Price the ranks of pipeline coordinate `pp_rank`."""
        stages, made = self.stages(layout, pp_rank), self.bucket_planner.buckets(layout, pp_rank)
        ring_buffers = self.bucket_planner.ring_buffers(layout, self.bucket_planner.runs(layout, pp_rank), pp_rank)
        inputs = {name: spec for s in stages for name, spec in s.inputs.items()}
        bucket_peak = max(bucket_workspace(b, self.policy, layout.elementwise) for b in made)
        data = input_bytes(inputs, layout.gradient_accumulation_steps, self.widths) + sum(
            s.fp8_state_bytes for s in stages
        )
        pools = self.pools(stages)
        [(arena, routed)], [host] = pools.activations(layout, (pp_rank,)), pools.pinned(layout, (pp_rank,))
        flops, redistributions = self.work(layout, pp_rank)
        state = rank_bucket_bytes(((b, 1) for b in made), self.policy)
        return RankPrice(
            resident=state | ring_buffer_bytes(*ring_buffers) | {"data": data},
            arena=arena, routed=routed, workspace=max(bucket_peak, *(s.workspace for s in stages)),
            flops=flops + Counter(update=self._update(made, layout, pp_rank)), redistributions=redistributions,
            host=host + sum(host_optimizer_bytes(b, self.policy) for b in made),
        )  # fmt: skip

    def _update(self, made: Iterable[Bucket], layout: Layout, pp_rank: int) -> Flops:
        """FLOPs of the matrix updates, of the stage's first rank, which has the largest matrices."""
        rank = first_rank(Mesh(layout), pp_rank)
        return sum(muon.flops(b, muon.own(b, rank)) for b in made if b.optimizer_kind.by_matrix)

    def work(self, layout: Layout, pp_rank: int) -> tuple[Counter[str], Counter[Wire]]:
        """FLOPs of a step by phase, without the update, and bytes of collectives."""
        layers = counted(self.layers_of_rank(layout, pp_rank))
        each = [(n, *self.recorder.work(self.layer_program(layout, kind), layout)) for kind, n in layers.items()]
        flops, wires = ([(n, x) for n, x, _ in each], [(n, x) for n, _, x in each])
        return _total(layout, flops), _total(layout, wires)

    def stages(self, layout: Layout, pp_rank: int) -> tuple[StageSum, ...]:
        """The sum of the layers of each model chunk of a pipeline rank. Equal stages share one object."""
        return self.stages_by_group(layout)[self.assignment(layout).group[pp_rank]]

    def stages_by_group(self, layout: Layout) -> list[tuple[StageSum, ...]]:
        """The same, for each group of ranks with the same stages."""
        assignment = self.assignment(layout)
        memory = {kind: self.layer_memory(layout, kind) for kind in assignment.kinds}
        return assignment.by_group(
            [self._sum(tuple([(memory[kind], n) for kind, n in chain])) for chain in assignment.chains]
        )

    def _sum(self, runs: tuple[RepeatedLayer, ...]) -> StageSum:
        if runs not in self.sums:
            self.sums[runs] = add_up(runs, self._borders(shortened(runs)))
        return self.sums[runs]

    def _borders(self, runs: tuple[RepeatedLayer, ...]) -> Borders:
        if runs not in self.borders:
            self.borders[runs] = borders(runs)
        return self.borders[runs]

    def pools(self, stages: tuple[StageSum, ...]) -> Pools:
        """The activation buffers of a rank whose model chunks are `stages`."""
        if stages not in self.pooled:
            self.pooled[stages] = Pools.of(stages)
        return self.pooled[stages]

    def layers_of_rank(self, layout: Layout, pp_rank: int) -> RankLayers:
        """The layers of each model chunk of one pipeline rank."""
        return self.assignment(layout).by_rank[pp_rank]

    @tracked
    def assignment(self, layout: Layout) -> StageAssignment:
        """Which layers each pipeline rank has."""
        key = self.layers_by_stage(layout), layout.placement
        return self.assignments.setdefault(key, StageAssignment.of(*key))


def _total(layout: Layout, parts: Iterable[tuple[int, Mapping[_Key, int]]]) -> Counter[_Key]:
    """The sum over all micro-batches, of so many layers of each part."""
    out = Counter[_Key]()
    for layers, part in parts:
        for key, amount in part.items():
            out[key] += amount * layers * layout.gradient_accumulation_steps
    return +out

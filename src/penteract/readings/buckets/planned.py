"""The buckets of a pipeline rank, counted by the types of its layers: equal layers are packed only once.

`parallel/bucket_plans.py` has the rules of packing. A test compares the counts here with its plans one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import OptimizerKinds
from penteract.config.precision.policy import Policy
from penteract.model.decoder import owning_pp_ranks, shared
from penteract.parallel.bucket_plans import BucketPlan, BucketRules, FsdpUnit, bucket_plans, products
from penteract.parallel.data import Bucket, bucket_of
from penteract.readings.buckets.counted import Counted, count_bucket_plans
from penteract.readings.buckets.listed import ListedPlans, ListedUnit, listed
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD, LayerType, Recorder, Uses
from penteract.readings.layers.reads import Memos, tracked
from penteract.readings.layers.stage_assignment import RankLayers, StageAssignment
from penteract.readings.price import (
    bucket_bytes,
    bucket_workspace,
    host_optimizer_bytes,
    rank_bucket_bytes,
    ring_buffer_bytes,
)
from penteract.step.ring_buffer import DEPTH, depth, gathered_bytes, ring_buffer_sizes, summed_bytes
from penteract.units import Bytes


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """Memory of a rank's buckets.

    held         bytes between steps, by kind
    ring_buffer  bytes of the ring buffers of unsharded units
    resident     both together
    largest      the most that an update, a reduction or a gather allocates
    host         optimizer states on the host
    """

    held: Mapping[str, Bytes]
    ring_buffer: Bytes
    resident: Bytes
    largest: Bytes
    host: Bytes


class _Part(NamedTuple):
    """A bucket: its bytes between steps by kind, the most that reducing, updating or gathering it allocates, and its
    bytes on the host."""

    bucket: Bucket
    held: Mapping[str, Bytes]
    largest: Bytes
    host: Bytes


class Units(NamedTuple):
    """Equal units of a rank in a row."""

    kind: LayerType
    unit: FsdpUnit
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The units of a rank. Ranks with equal units share one object, which caches use as their key. `kinds`: each
    different unit, with the type of its layer."""

    units: tuple[Units, ...]
    kinds: Mapping[FsdpUnit, LayerType] = field(init=False)

    def __post_init__(self) -> None:
        """List the different units."""
        object.__setattr__(self, "kinds", {run.unit: run.kind for run in self.units})


@dataclass(frozen=True, slots=True, eq=False)
class StageGroups:
    """The units of pipeline ranks with the same stages, and which ranks these are. Equal ones are one object.

    runs    for each model chunk anew
    joined  with equal neighbours as one run, of two chunks or of layers that differ in recomputation: more layouts have
            the same ones. It is enough to count buckets, which do not end where a chunk ends
    """

    runs: tuple[Runs, ...]
    joined: tuple[Runs, ...]
    ranks: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class BucketPlanner:
    """Packs the parameters of pipeline ranks into buckets. `assignment`: the stages of a layout's ranks."""

    model: ModelSpec
    policy: Policy
    optimizer_kinds: OptimizerKinds
    recorder: Recorder
    assignment: Callable[[Layout], StageAssignment]
    memos: Memos = field(default_factory=Memos)
    interned: dict[Hashable, Any] = field(
        default_factory=dict[Hashable, Any]
    )  # one object for equal units, runs and bucket plans

    # ---- one by one ------------------------------------------------------------------------------------------

    def bucket_plans(self, layout: Layout, pp_rank: int) -> tuple[BucketPlan, ...]:
        """The bucket plans of a rank."""
        return self.listed(layout, self.runs(layout, pp_rank), pp_rank).plans

    def listed(self, layout: Layout, runs: Runs, pp_rank: int) -> ListedPlans:
        """The bucket plans of a rank with these units, and where their parameters are."""
        return self._listed(layout, self._joined(runs), pp_rank)  # no plan ends where a chunk does

    @tracked
    def _listed(self, layout: Layout, runs: Runs, pp_rank: int) -> ListedPlans:
        used = {kind: self.recorder.uses(layout, kind) for kind in runs.kinds.values() if kind in EMBEDDING_AND_HEAD}
        again = {kind: {p.name for p in uses.params} for kind, uses in used.items()}
        every = [run for run in runs.units for _ in range(run.number)]
        units = [run.unit for run in every]
        plans = bucket_plans(self._rules(layout, units, pp_rank), units)
        return listed(plans, [ListedUnit(run.unit.params, again.get(run.kind, ())) for run in every])

    def buckets(self, layout: Layout, pp_rank: int) -> tuple[Bucket, ...]:
        """The buckets of a rank."""
        mesh = Mesh(layout)
        rank = first_rank(mesh, pp_rank)
        return tuple(bucket_of(plan, mesh, rank) for plan in self.bucket_plans(layout, pp_rank))

    # ---- by type of layer ------------------------------------------------------------------------------------

    def runs(self, layout: Layout, pp_rank: int) -> Runs:
        """The units of a rank."""
        return self.groups(layout).runs[self.assignment(layout).group[pp_rank]]

    @tracked
    def groups(self, layout: Layout) -> StageGroups:
        """The units of pipeline ranks with the same stages."""
        assignment, cut = self.assignment(layout), layout.cuts_units
        uses = tuple([self.recorder.uses(layout, kind) for kind in assignment.kinds])
        key = (assignment, uses, cut)
        if key not in self.interned:
            used = dict(zip(assignment.kinds, uses, strict=True))
            runs = tuple([self._runs(own, used, cut=cut) for own in assignment.by_group(assignment.chains)])
            self.interned[key] = StageGroups(runs, tuple(map(self._joined, runs)), assignment.groups)
        return self.interned[key]

    def _runs(self, chains: RankLayers, uses: Mapping[LayerType, Uses], *, cut: bool) -> Runs:
        """The units of a chunk's layers. A parameter of both embedding and head belongs to the first of them."""
        ends: set[str] = set()
        out: list[Units] = []
        for kind, n in chain.from_iterable(chains):
            names = {p.name for p in uses[kind].params} if kind in EMBEDDING_AND_HEAD else set[str]()
            out.append(Units(kind, self._unit(uses[kind], frozenset(names & ends), cut=cut), n))
            ends |= names
        return self.interned_runs(tuple(out))

    def interned_runs(self, units: tuple[Units, ...]) -> Runs:
        """These units: equal ones are one object."""
        if units not in self.interned:
            self.interned[units] = Runs(units)
        return self.interned[units]

    def _joined(self, runs: Runs) -> Runs:
        """The same units, with equal neighbours as one run."""
        out: list[Units] = []
        for run in runs.units:
            if out and out[-1].unit is run.unit:
                out[-1] = out[-1]._replace(number=out[-1].number + run.number)
            else:
                out.append(run)
        return self.interned_runs(tuple(out))

    def _unit(self, used: Uses, again: frozenset[str], *, cut: bool) -> FsdpUnit:
        """The unit of a layer. `again`: parameters that belong to another unit already."""
        key = (used, again, cut)
        if key not in self.interned:
            params = tuple([p for p in used.params if p.name not in again])
            both = shared(self.model)
            self.interned[key] = (
                FsdpUnit(params, used.delayed_weight_gradients, both, used.quantised_weights, used.known_weights)
                if cut
                else FsdpUnit(params, shared=both, known_weights=used.known_weights)
            )
        return self.interned[key]

    @tracked
    def counted(self, layout: Layout, runs: Runs, pp_rank: int) -> Counted:
        """The bucket plans of a rank with these units, on a pipeline rank."""
        if not self.shares(runs):
            pp_rank = 0  # every pipeline rank has the same plans
        rules = self._rules(layout, [run.unit for run in runs.units], pp_rank)
        own = {unit: self._unit_plans(layout, unit, pp_rank) for unit in dict.fromkeys(run.unit for run in runs.units)}
        found = count_bucket_plans(rules, [(run.unit, own[run.unit], run.number) for run in runs.units])
        return tuple([(self.interned.setdefault((*plan.kind, plan.key.owning_pp_ranks), plan), n) for plan, n in found])

    @tracked
    def _unit_plans(self, layout: Layout, unit: FsdpUnit, pp_rank: int) -> list[BucketPlan]:
        """The bucket plans with parameters of this unit only."""
        return list(self._rules(layout, [unit], pp_rank).of_unit(unit, 0)) if layout.cuts_units else []

    @tracked
    def bucket(self, layout: Layout, plan: BucketPlan, pp_rank: int) -> Bucket:
        """The bucket of a plan on the first of the ranks with this pipeline coordinate."""
        mesh = Mesh(layout)
        return bucket_of(plan.at(pp_rank), mesh, first_rank(mesh, pp_rank))

    @tracked
    def _part(self, layout: Layout, plan: BucketPlan, pp_rank: int) -> _Part:
        b, p = self.bucket(layout, plan, pp_rank), self.policy
        return _Part(b, bucket_bytes((b,), p), bucket_workspace(b, p, layout.elementwise), host_optimizer_bytes(b, p))

    def unit_buckets(self, layout: Layout, runs: Runs, pp_rank: int) -> list[list[Bucket]]:
        """The buckets with parameters of one unit only, for each run of equal units."""
        at = pp_rank if self.shares(runs) else 0
        made = {unit: self.buckets_of(layout, unit, at) for unit in dict.fromkeys(run.unit for run in runs.units)}
        return [made[run.unit] for run in runs.units]

    @tracked
    def buckets_of(self, layout: Layout, unit: FsdpUnit, pp_rank: int) -> list[Bucket]:
        """The buckets with parameters of this unit only."""
        return [self.bucket(layout, plan, pp_rank) for plan in self._unit_plans(layout, unit, pp_rank)]

    @tracked
    def state(self, layout: Layout, runs: Runs, pp_rank: int) -> BucketMemory:
        """Bucket memory of a rank with these units. It depends on the pipeline rank only if others share parameters."""
        parts = [(self._part(layout, plan, pp_rank), n) for plan, n in self.counted(layout, runs, pp_rank)]
        kinds = rank_bucket_bytes(
            [(part.bucket, n) for part, n in parts], self.policy, [part.held for part, _ in parts]
        )
        ring_buffer = sum(ring_buffer_bytes(*self.ring_buffers(layout, runs, pp_rank)).values())
        resident, largest = sum(kinds.values()) + ring_buffer, max([part.largest for part, _ in parts])
        return BucketMemory(kinds, ring_buffer, resident, largest, sum([n * part.host for part, n in parts]))

    def ring_buffers(self, layout: Layout, runs: Runs, pp_rank: int) -> tuple[Bytes, Bytes]:
        """Bytes of a rank's ring buffers: of gathered parameters, and of gradients in one action."""
        if not layout.cuts_units:
            return 0, 0
        n, widths = depth(layout, sum([run.number for run in runs.units])), self.policy.widths
        parameters, gradients, begin = dict[int, Bytes](), dict[int, Bytes](), 0
        sizes: dict[FsdpUnit, tuple[Bytes, Bytes]] = {}
        for run, own in zip(runs.units, self.unit_buckets(layout, runs, pp_rank), strict=True):
            # Further units of the run reuse the same entries.
            if run.unit not in sizes:
                sizes[run.unit] = (
                    sum([gathered_bytes(b, widths) for b in own]),
                    sum([summed_bytes(b, widths) for b in own]),
                )
            parameters |= dict.fromkeys(range(begin, begin + min(run.number, n)), sizes[run.unit][0])
            gradients |= dict.fromkeys(range(begin, begin + min(run.number, DEPTH)), sizes[run.unit][1])
            begin += run.number
        return sum(ring_buffer_sizes(parameters, n)), sum(ring_buffer_sizes(gradients, DEPTH))

    def shares(self, runs: Runs) -> bool:
        """Whether these units have parameters that live on other pipeline ranks too."""
        return bool(shared(self.model)) and any(run.kind in EMBEDDING_AND_HEAD for run in runs.units)

    def _rules(self, layout: Layout, units: Sequence[FsdpUnit], pp_rank: int) -> BucketRules:
        where = owning_pp_ranks(self.model, layout, {p.name: pp_rank for unit in units for p in unit.params})
        return BucketRules(where, Mesh(layout), self.policy, self.optimizer_kinds, products(units))


def first_rank(mesh: Mesh, pp_rank: int) -> int:
    """The first of the ranks with this pipeline coordinate."""
    return mesh.ranks((pp_rank,), (0,), (0,))[0]

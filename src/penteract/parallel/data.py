"""Data parallelism.

Split      sequences; every rank of a group holds the same parameters. ZeRO cuts what they keep of them: stage 1 what
           the optimizer keeps, stage 2 gradients too, stage 3 parameters too; HSDP cuts within groups of ranks.
Traffic    bucket   a flat buffer of gradients is summed over its reduce group as soon as its last writer has run, while
           backward goes on. No redistribution of the network reduces gradients.
           shard    under ZeRO the sum is a reduce-scatter: each of the ranks that share the bucket gets its own equal
           part, keeps optimizer state for that part alone, moves it, and an all-gather makes the parameters whole.
           unit     from stage 2 on a bucket is of one unit (the embedding, a layer, the head): its gradients are
           summed after every micro-batch, and under stage 3 its parameters are gathered one unit ahead of their use;
           matrices that products read as codes of FP8 may travel as such.
Costs      every gradient once a step, hidden under the backward of earlier layers. ZeRO 1 puts no more on the wire: an
           all-reduce is both of its halves in one, and the second half is then in the parameters' own precision.
           ZeRO 2 sums, and ZeRO 3 gathers too, for every micro-batch.
Helps      always, until the batch is as large as it may be; hurts when there is too little work to hide the traffic.
Papers     Li 2020 (2006.15704); Rajbhandari 2019 (1910.02054) §5; Zhao 2023 (2304.11277) §3.2.2 for groups
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.optimizers import ADAMW, PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import Policy, Role, grain
from penteract.ops.params import Cut, OwningStages, Param, reduce_ranks
from penteract.parallel.matrix import Matrix, matrices, peers

UNIT = 8  # elements: shards begin where a load of 16 bytes may, in bf16 too
CODES = 16  # the same of codes
NONE = -1  # the unit of what belongs to no single one


class BucketKey(NamedTuple):
    """What parameters of one bucket have in common."""

    cut: Cut
    owning_stages: tuple[int, ...]
    decay: bool
    moments: str
    delayed: bool = False  # its gradient may wait, so that zero-bubble writes it in another action
    optimizer_kind: OptimizerKind = ADAMW
    gathered_as: Role = "parameter"


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that are used together, in the order of their first use: the embedding, a layer, the head.

    `delayed`: those whose gradients may wait. `shared`: those that other units use too, so that they stay whole.
    `coded`: those that are gathered as codes.
    """

    params: tuple[Param, ...]
    delayed: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    coded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that live in one flat buffer. It is homogeneous: one group that must agree, one optimizer group.

    shard_ranks      those that share one copy of what is sharded, in their order: a shard each
    replicate_ranks  those with this rank's shard, one in each shard group
    unit             the unit that it is a part of, counted on the rank in the order of forward
    matrices         those that its optimizer needs whole; `peers`: the ranks with the slices of each
    gathered_as      what its shards go over wires as, and lie whole for a while: "parameter", or codes of FP8
    moments          the dtype of the moments that its optimizer keeps

    The buffer may end in padding, zero from the start and zero after every update.
    """

    params: tuple[Param, ...]
    offsets: tuple[int, ...]  # in elements
    size: int  # in elements, with padding
    reduce_ranks: tuple[int, ...]
    decay: bool
    across_stages: bool  # of several owning stages: summed after the last backward, as stages differ in order
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    unit: int = NONE
    shards: int = 1
    delayed: bool = False  # its gradients may wait
    cut_gradients: bool = False  # between actions there is this rank's shard of them alone
    cut_parameters: bool = False
    optimizer_kind: OptimizerKind = ADAMW
    matrices: tuple[Matrix, ...] = ()
    peers: tuple[int, ...] = ()
    offloaded: bool = False  # what the optimizer keeps of this rank's shard lies on the host
    gathered_as: Role = "parameter"
    moments: str = "fp32"

    @property
    def summed(self) -> bool:
        """Whether its gradients are a sum over ranks."""
        return len(self.reduce_ranks) > 1

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that share the work on its matrices: those that share its shards, or else have all of it alike."""
        return self.shard_ranks if self.shards > 1 else self.replicate_ranks

    @property
    def gathered_after_update(self) -> bool:
        """Whether its parameters are whole from step to step while each rank moves its shard alone."""
        return self.shards > 1 and not self.cut_parameters

    @property
    def shard_size(self) -> int:
        """In elements, the same for every holder."""
        return self.size // self.shards

    def shard(self, rank: int) -> range:
        """The elements whose optimizer state `rank`, one of the shard group, keeps."""
        at = self.shard_ranks.index(rank) * self.shard_size if self.shards > 1 else 0
        return range(at, at + self.shard_size)


@dataclass(frozen=True, slots=True, eq=False)
class BucketPlan:
    """Parameters that share a bucket, whoever holds it."""

    key: BucketKey
    params: tuple[Param, ...]
    offsets: tuple[int, ...]
    elements: int
    unit: int = NONE

    @property
    def shapes(self) -> tuple[object, ...]:
        """What decides the work on its matrices, beside how they are cut; nothing where elements are moved alone."""
        return _shapes(self.key, self.params)

    @property
    def kind(self) -> tuple[object, ...]:
        """All that decides what its bucket holds, and how it is summed and moved."""
        return self.key, self.elements, self.unit == NONE, self.shapes

    def at(self, stage: int) -> BucketPlan:
        """The same parameters of another pipeline rank, unless several share them."""
        several = len(self.key.owning_stages) > 1
        return self if several else replace(self, key=self.key._replace(owning_stages=(stage,)))


def _shapes(key: BucketKey, params: Iterable[Param]) -> tuple[object, ...]:
    return tuple((p.shape, p.shards) for p in params) if key.optimizer_kind.by_matrix else ()


def bucket_plans(rules: BucketRules, units: Sequence[Unit]) -> Iterator[BucketPlan]:
    """The units of a rank in the order of forward -> groups of about layout.bucket_bytes, as backward finishes them.

    Those of what is cut from ZeRO 2 on are of one unit; what a unit needs together under ZeRO 3 is in one, however
    large. Parameters with several owning stages come last, in the order of their names: stages hold them among
    different others, and must plan them alike and talk about them in one order.
    """
    whole = list[Param]()
    for number, unit in reversed(list(enumerate(units))):
        yield from rules.of_unit(unit, number)
        whole += rules.beyond(unit)
    open_: dict[BucketKey, Filling] = {}
    for p in sorted(whole, key=rules.turn):
        key, n = rules.kind(p)
        filling = open_.get(key) or open_.setdefault(key, Filling(key, rules.limit))
        if plan := filling.add(p, n):
            del open_[key]
            yield plan
    yield from (filling.close() for filling in open_.values())


def as_backward_finishes(params: Iterable[Param]) -> Iterator[Param]:
    """From the last used to the first. Joined ones, whose gradients one product makes, stay in their order."""
    runs = list[list[Param]]()
    for p in params:
        if runs and runs[-1][-1].joined:
            runs[-1].append(p)
        else:
            runs.append([p])
    for run in reversed(runs):
        yield from run


_NO_UNIT = Unit(())


@dataclass(slots=True)
class Filling:
    """Parameters of one kind, as they fill one plan after another. `limit`: elements that do; None: none do."""

    key: BucketKey
    limit: int | None
    unit: int = NONE
    params: list[Param] = field(default_factory=list[Param])
    ends: list[int] = field(default_factory=lambda: [0])  # where each begins, and where the last ends

    @property
    def held(self) -> tuple[object, ...]:
        """All that decides what further parameters fill."""
        return self.ends[-1], _shapes(self.key, self.params)

    def add(self, p: Param, n: int) -> BucketPlan | None:
        """`n`: its elements on a rank. The plan, if that fills it."""
        self.params.append(p)
        self.ends.append(self.ends[-1] + n)
        full = self.limit is not None and self.ends[-1] >= self.limit
        return self.close() if full and not p.joined else None

    def close(self) -> BucketPlan:
        """What is there as a plan; the next one is empty."""
        plan = BucketPlan(self.key, tuple(self.params), tuple(self.ends[:-1]), self.ends[-1], self.unit)
        self.params, self.ends = [], [0]
        return plan


@dataclass(slots=True)
class BucketRules:
    """Which parameters of a rank go together, and how many fill a plan."""

    owning_stages: OwningStages
    mesh: Mesh
    policy: Policy
    optimizer_kinds: OptimizerKinds
    known: dict[tuple[int, bool, bool], tuple[BucketKey, int]] = field(
        default_factory=dict[tuple[int, bool, bool], tuple[BucketKey, int]]
    )  # by identity: layers that are alike may share their parameters

    @property
    def limit(self) -> int:
        """Elements that fill a plan."""
        return self.mesh.layout.bucket_bytes // self.policy.widths["gradient"]

    def beyond(self, unit: Unit) -> Iterator[Param]:
        """Those that are packed with others of the rank, as backward finishes them."""
        return (p for p in as_backward_finishes(unit.params) if not self._cut(p, unit))

    def of_unit(self, unit: Unit, number: int) -> Iterator[BucketPlan]:
        """The bucket plans of one unit alone, which has this number on the rank."""
        open_: dict[BucketKey, Filling] = {}
        limit = self.limit if self.mesh.layout.zero == 2 else None
        for p in as_backward_finishes(unit.params):
            if self._cut(p, unit):
                key, n = self.kind(p, unit)
                filling = open_.get(key) or open_.setdefault(key, Filling(key, limit, number))
                if plan := filling.add(p, n):
                    del open_[key]
                    yield plan
        yield from (filling.close() for filling in open_.values())

    def turn(self, p: Param) -> str:
        """By which parameters are packed that are not of one unit; among equals as backward finishes them."""
        return p.name if len(self.owning_stages[p.name]) > 1 else ""

    def kind(self, p: Param, unit: Unit = _NO_UNIT) -> tuple[BucketKey, int]:
        """What it shares with those that it may be packed with, and its elements on a rank."""
        same = id(p), p.name in unit.delayed, p.name in unit.coded
        if same not in self.known:
            key = BucketKey(
                p.cut(self.mesh), self.owning_stages[p.name], p.decay, self.policy.moments_of(p.name),
                p.name in unit.delayed,
                self.optimizer_kinds.of(matrix=p.matrix), "code" if p.name in unit.coded else "parameter",
            )  # fmt: skip
            self.known[same] = key, p.numel(self.mesh)
        return self.known[same]

    def _cut(self, p: Param, unit: Unit) -> bool:
        """Whether it is cut with its unit."""
        return self.mesh.layout.cuts_units and p.name not in unit.shared and len(self.owning_stages[p.name]) == 1


def shard_groups(members: tuple[int, ...], layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of `reduce_ranks` of a piece -> those that share a copy of it with `rank`, and those that have the same shard.

    Under ZeRO 0 each has all of it. A shard group is `shard_group` neighbours in (dp, cp) read as one number.
    """
    lay = layout
    if not lay.zero:
        return (rank,), members
    if not lay.shard_group:
        return members, (rank,)
    groups: dict[int, list[int]] = {}
    for r in members:
        groups.setdefault(r // lay.tp % lay.rows // lay.shard_group, []).append(r)
    own = next(g for g in groups.values() if rank in g)
    at = own.index(rank)
    return tuple(own), tuple(sorted(g[at] for g in groups.values()))


def bucket_of(plan: BucketPlan, mesh: Mesh, rank: int) -> Bucket:
    """The flat buffer of a plan on one rank."""
    lay, where = mesh.layout, plan.key.owning_stages
    members = reduce_ranks(plan.key.cut, where, mesh, rank)
    shard_ranks, replicate_ranks = shard_groups(members, lay, rank)
    shards = len(shard_ranks)
    block = grain(plan.key.moments)
    fewest = CODES if plan.key.gathered_as == "code" else UNIT
    each = shards * (max(fewest, block) if shards > 1 else block)
    size = -(-plan.elements // each) * each
    cut = plan.unit != NONE and shards > 1
    optimizer_kind, whole = plan.key.optimizer_kind, plan.key.optimizer_kind.by_matrix
    return Bucket(
        plan.params, plan.offsets, size, members, plan.key.decay, len(where) > 1, shard_ranks, replicate_ranks,
        plan.unit,
        shards, plan.key.delayed, cut_gradients=cut and not lay.reduce_scatter_once,
        cut_parameters=cut and lay.zero == 3,
        optimizer_kind=optimizer_kind, matrices=tuple(matrices(plan.params, plan.offsets, mesh)) if whole else (),
        peers=peers(plan.params, mesh, rank) if whole else (),
        offloaded=lay.offload_optimizer and not optimizer_kind.by_matrix, gathered_as=plan.key.gathered_as,
        moments=plan.key.moments,
    )  # fmt: skip


def buckets(
    units: Sequence[Unit],
    owning_stages: OwningStages,
    mesh: Mesh,
    rank: int,
    policy: Policy,
    *,
    optimizer_kinds: OptimizerKinds = PLAIN,
) -> tuple[Bucket, ...]:
    """The flat buckets of a rank, in the order in which they fill."""
    return tuple(
        bucket_of(plan, mesh, rank)
        for plan in bucket_plans(BucketRules(owning_stages, mesh, policy, optimizer_kinds), units)
    )

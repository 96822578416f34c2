"""Data parallelism.

Split      sequences; every rank of a group holds the same parameters. ZeRO 1 shards optimizer states, ZeRO 2 gradients
           too, ZeRO 3 parameters too; HSDP shards within groups of ranks.
Traffic    bucket   a flat buffer of gradients is reduced over its reduce group right after its last write, while
           backward continues. No redistribution of the network reduces parameter gradients.
           shard    under ZeRO the reduction is a reduce-scatter: each rank of the shard group gets an equal part, keeps
           optimizer states for that part only, and updates it; an all-gather makes the parameters whole.
           unit     a bucket ends where an FSDP unit (the embedding, a layer, the head) does: one collective a layer
           takes less from the products beside it than several. From ZeRO 2 on it belongs to one unit: its gradients
           are reduced after every micro-batch; under ZeRO 3 its parameters are gathered one unit before their use.
           Weights of FP8 products may be gathered in FP8.
Costs      every gradient once a step, overlapped with the backward of earlier layers. ZeRO 1 sends no more: its
           reduce-scatter and all-gather together make an all-reduce, and the gather is in the parameters' precision.
           ZeRO 2 reduces for every micro-batch; ZeRO 3 gathers for every micro-batch too.
Helps      always, until the batch is as large as it may be; hurts when there is too little work to hide the traffic.
Papers     Li 2020 (2006.15704); Rajbhandari 2019 (1910.02054) §5; Zhao 2023 (2304.11277) §3.2.2 for groups
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.optimizers import ADAMW, PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import Policy, Role, grain
from penteract.ops.params import OwningPpRanks, Param, reduce_ranks
from penteract.parallel.bucket_plans import NONE, BucketPlan, BucketRules, FsdpUnit, bucket_plans, products
from penteract.parallel.known_weights import KnownWeights
from penteract.parallel.matrix import Matrix, matrices, peers

SHARD_MULTIPLE = 8  # elements: shards begin at multiples of 16 bytes, in bf16 too
FP8_SHARD_MULTIPLE = 16  # the same for FP8


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters in one flat buffer. It is homogeneous: one reduce group, one optimizer group.

    shard_ranks      the shard group: ranks that hold one copy together, one shard each, in order
    replicate_ranks  the replicate group: ranks with the same shard, one in each shard group
    unit             the FSDP unit that it belongs to, numbered on the rank in forward order
    matrices         the matrices that its optimizer needs whole; `peers`: the ranks with the slices of each
    gathered_as      the role in which its shards are gathered: "parameter", or "fp8" for FP8
    moments          the dtype of the moments that its optimizer keeps
    known_weights    those whose largest values are kept from one update to the next

    The buffer may end in padding, zero from the start and zero after every update.
    """

    params: tuple[Param, ...]
    offsets: tuple[int, ...]  # in elements
    size: int  # in elements, with padding
    reduce_ranks: tuple[int, ...]
    decay: bool
    across_pp_ranks: bool  # several pipeline ranks hold it; reduced after the last backward, as they differ in order
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    unit: int = NONE
    shards: int = 1
    delayed_weight_gradients: bool = False  # zero-bubble schedules may write its gradients in a later action
    cut_gradients: bool = False  # between actions only this rank's shard of them is kept
    cut_parameters: bool = False
    optimizer_kind: OptimizerKind = ADAMW
    matrices: tuple[Matrix, ...] = ()
    peers: tuple[int, ...] = ()
    offloaded: bool = False  # the optimizer states of this rank's shard are on the host
    gathered_as: Role = "parameter"
    moments: str = "fp32"
    known_weights: tuple[KnownWeights, ...] = ()

    @property
    def summed(self) -> bool:
        """Whether its gradients are summed over ranks."""
        return len(self.reduce_ranks) > 1

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that share the work on its matrices: the shard group, or if it is not sharded, the replicas."""
        return self.shard_ranks if self.shards > 1 else self.replicate_ranks

    @property
    def gathered_after_update(self) -> bool:
        """Whether its parameters stay whole but each rank updates only its shard, so that an all-gather follows."""
        return self.shards > 1 and not self.cut_parameters

    @property
    def shard_size(self) -> int:
        """In elements, the same on every rank."""
        return self.size // self.shards

    def shard(self, rank: int) -> range:
        """The elements whose optimizer states are on `rank`, one of the shard group."""
        at = self.shard_ranks.index(rank) * self.shard_size if self.shards > 1 else 0
        return range(at, at + self.shard_size)


def shard_groups(members: tuple[int, ...], layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`members`: the `reduce_ranks` of a parameter -> the shard group of `rank`, and its replicate group.

    Under ZeRO 0 each rank holds all of it. A shard group has `shard_group` neighbouring ranks in (dp, cp) order.
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
    lay, where = mesh.layout, plan.key.owning_pp_ranks
    members = reduce_ranks(plan.key.cut, where, mesh, rank)
    shard_ranks, replicate_ranks = shard_groups(members, lay, rank)
    shards = len(shard_ranks)
    block = grain(plan.key.moments)
    fewest = FP8_SHARD_MULTIPLE if plan.key.gathered_as == "fp8" else SHARD_MULTIPLE
    each = shards * (max(fewest, block) if shards > 1 else block)
    size = -(-plan.elements // each) * each
    cut = plan.unit != NONE and shards > 1
    optimizer_kind, whole = plan.key.optimizer_kind, plan.key.optimizer_kind.by_matrix
    return Bucket(
        plan.params, plan.offsets, size, members, plan.key.decay, len(where) > 1, shard_ranks, replicate_ranks,
        plan.unit,
        shards, plan.key.delayed_weight_gradient, cut_gradients=cut and not lay.reduce_scatter_once,
        cut_parameters=cut and lay.zero == 3,
        optimizer_kind=optimizer_kind, matrices=tuple(matrices(plan.params, plan.offsets, mesh)) if whole else (),
        peers=peers(plan.params, mesh, rank) if whole else (),
        offloaded=lay.offload_optimizer and not optimizer_kind.by_matrix, gathered_as=plan.key.gathered_as,
        moments=plan.key.moments, known_weights=plan.known_weights,
    )  # fmt: skip


def buckets(
    units: Sequence[FsdpUnit],
    owning_pp_ranks: OwningPpRanks,
    mesh: Mesh,
    rank: int,
    policy: Policy,
    *,
    optimizer_kinds: OptimizerKinds = PLAIN,
) -> tuple[Bucket, ...]:
    """The flat buckets of a rank, in the order in which they fill."""
    return tuple(
        bucket_of(plan, mesh, rank)
        for plan in bucket_plans(BucketRules(owning_pp_ranks, mesh, policy, optimizer_kinds, products(units)), units)
    )

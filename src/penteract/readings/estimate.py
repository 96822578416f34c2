"""How much memory and work a layout needs: memory of the fullest rank by kind, and FLOPs of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from penteract.config.hardware import HEADROOM, Cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy, policy
from penteract.config.rules.legal import check_legal
from penteract.readings.price import Price, price
from penteract.step.program import compile_step
from penteract.units import Bytes, Flops, gib


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and FLOPs of one optimizer step. `by_pp_rank[i]` is the price of pipeline rank i.

    All of it is exact, except for what routing decides. That is modelled: every expert gets the same share.

    memory_gib  by kind, of the fullest rank: parameters, gradients, optimizer, data, activations, workspace
    flops       matrix products of forward and backward on all ranks; those of the update are in each price's `flops`
    fits        whether tensors leave the headroom free; None if the cluster's memory is not known
    """

    layout: Layout
    by_pp_rank: tuple[Price, ...] = field(repr=False)
    memory_gib: dict[str, float]
    allocated: Bytes
    flops: Flops
    tokens: int
    fits: bool | None

    @property
    def allocated_gib(self) -> float:
        """What the fullest rank allocates, in GiB."""
        return gib(self.allocated)


def estimate(
    model: ModelSpec,
    layout: Layout,
    cluster: Cluster | None = None,
    *,
    sequence_length: int = 2048,
    precision: str | Policy = "bf16",
    headroom: float = HEADROOM,
) -> Estimate:
    """Price one step of `model` under `layout`, without torch.

    `headroom`: share of a GPU's memory kept free of tensors, as in `penteract plan`.
    Raises BadInput for an illegal layout, and names the nearest legal one.
    """
    precision = policy(precision)
    check_legal(model, layout, sequence_length)
    mesh = Mesh(layout)
    ranks = mesh.group("pp", 0)
    by_pp_rank = tuple(price(compile_step(model, layout, sequence_length, rank=r, precision=precision)) for r in ranks)
    fullest = max(by_pp_rank, key=lambda s: s.allocated)
    memory = {kind: gib(size) for kind, size in fullest.resident.items()}
    memory |= {"activations": gib(fullest.arena + fullest.routed), "workspace": gib(fullest.workspace)}
    return Estimate(
        layout=layout,
        by_pp_rank=by_pp_rank,
        memory_gib=memory,
        allocated=fullest.allocated,
        flops=sum(s.total_flops - s.flops["update"] for s in by_pp_rank) * mesh.size("dp_cp_tp"),
        tokens=layout.global_batch_size * sequence_length,
        fits=_fits(layout, fullest, cluster, headroom),
    )


def _fits(layout: Layout, fullest: Price, cluster: Cluster | None, headroom: float) -> bool | None:
    """Whether there is a device for each rank, and enough memory for the fullest; None if that memory is not known."""
    if cluster is None or not cluster.memory_gib:
        return None
    return layout.world <= cluster.gpus and fullest.allocated <= cluster.usable(headroom)

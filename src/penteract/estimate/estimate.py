"""The answer to "what would this layout take": the fullest rank's memory by kind, and all ranks' work."""

from __future__ import annotations

from dataclasses import dataclass

from penteract.estimate.price import Price, price
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.legal import check_legal
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.step.program import compile_step
from penteract.units import Bytes, Flops, gib


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one optimizer step takes. `stages[i]` is the price of pipeline rank i; all of it is exact.

    memory_gib  by kind, of the fullest rank: parameters, gradients, optimizer, data, activations, workspace
    flops       of all ranks together, matrix products alone
    fits        None when the cluster's memory is not known
    """

    layout: Layout
    stages: tuple[Price, ...]
    memory_gib: dict[str, float]
    allocated: Bytes
    flops: Flops
    tokens: int
    fits: bool | None

    @property
    def allocated_gib(self) -> float:
        return gib(self.allocated)


def estimate(
    model: ModelSpec,
    layout: Layout,
    cluster: Cluster | None = None,
    *,
    sequence_length: int = 2048,
    precision: str = "fp32",
) -> Estimate:
    """Price one step of `model` under `layout`, without torch.

    Raises BadInput for a layout that cannot be, naming the nearest that can.
    """
    check_legal(model, layout, sequence_length)
    mesh = Mesh(layout)
    ranks = mesh.group("pp", 0)
    stages = tuple(price(compile_step(model, layout, sequence_length, rank=r, precision=precision)) for r in ranks)
    fullest = max(stages, key=lambda s: s.allocated)
    memory = {kind: gib(size) for kind, size in fullest.resident.items()} | {
        "activations": gib(fullest.arena),
        "workspace": gib(fullest.workspace),
    }
    return Estimate(
        layout=layout,
        stages=stages,
        memory_gib=memory,
        allocated=fullest.allocated,
        flops=sum(s.total_flops for s in stages) * mesh.size("stage"),
        tokens=layout.global_batch_size * sequence_length,
        fits=fullest.allocated <= cluster.memory_gib * 2**30 if cluster and cluster.memory_gib else None,
    )

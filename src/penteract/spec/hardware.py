"""WHERE it runs: devices by what a plan needs of them. Frozen values; catalogues and measured curves build on these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`gpus` equal devices, `gpus_per_node` of them behind one fast fabric.

    `memory_gib` is what one device offers to tensors.
    """

    name: str = "this machine"
    gpus: int = 1
    gpus_per_node: int = 8
    memory_gib: float = 0.0  # 0: not known, so nothing is said about fitting

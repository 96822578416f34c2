"""What a job needs of a Slurm cluster: the section `[slurm]` of run files and sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """Nodes, limits and surroundings of jobs. "auto" leaves a choice to the cluster."""

    ranks_per_node: int = 8
    nodes: int | Literal["auto"] = "auto"
    partition: str = AUTO
    account: str = AUTO
    qos: str = AUTO
    time: str = AUTO
    gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    gpu_type: str = AUTO
    exclusive: bool = True
    cpus_per_rank: int = 0
    memory: str = AUTO
    grace: int = 120  # seconds
    retries: int = 3
    container: str = NONE
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: Literal["none"] | tuple[str, ...] = "none"
    python: str = AUTO
    setup: Literal["none"] | tuple[str, ...] = "none"
    options: Literal["none"] | tuple[str, ...] = "none"
    usd_per_gpu_hour: float = 0.0

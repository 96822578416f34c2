"""This machine as a value, from all probes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penteract.engine.doctor.machine import HostReport, Use
from penteract.engine.doctor.probe.disk import disk
from penteract.engine.doctor.probe.gpus import gpus
from penteract.engine.doctor.probe.host import host, interfaces, limits
from penteract.engine.doctor.probe.network import ports
from penteract.engine.doctor.probe.packages import packages
from penteract.engine.doctor.probe.torch import torch
from penteract.engine.doctor.surroundings import TORCHRUN
from penteract.engine.runtime.rank_environment import rank_environment

# Variables that change how ranks start, connect, compute or allocate. Without those with which an image describes
# itself, such as NCCL_VERSION, and without possible secrets.
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SLURM_", "OMP_", "PYTORCH_", "TORCH_DISTRIBUTED_")
NAMES = (
    *TORCHRUN, "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MKL_NUM_THREADS",
    "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "CUBLAS_WORKSPACE_CONFIG", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip
IGNORED = ("NCCL_VERSION",)


def this_machine(folder: Path, environment: Mapping[str, str], ranks: int) -> HostReport:
    """This machine, for runs in `folder` that would have `ranks` ranks on it."""
    loaded = torch()
    return HostReport(
        host=host(),
        gpus=gpus(loaded),
        torch=loaded,
        disk=disk(folder),
        limits=limits(),
        packages=packages(),
        interfaces=interfaces(),
        ports=ports(),
        environment=_relevant(environment),
        # From the launcher's function, so that the report agrees with a run.
        use=Use(ranks=ranks, threads=int(rank_environment(environment, 0, ranks, 0)["OMP_NUM_THREADS"])),
    )


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith(PREFIXES)) and name not in IGNORED
    }

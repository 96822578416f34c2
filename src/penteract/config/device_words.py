"""What a rank has, in words: a GPU; on CPUs a process, which has a part of one."""

from __future__ import annotations

from penteract.config.hardware import Cluster

CPU = "cpu"  # the device of a hardware file that `penteract calibrate` writes where there is no GPU


def of_cpu(cluster: Cluster) -> bool:
    """Whether a hardware file is of a CPU: the processes of a host share its cores and its memory."""
    return cluster.gpu is not None and cluster.gpu.name == CPU


def device_word(count: int = 1, *, on_cpus: bool) -> str:
    """What one rank has, or so many."""
    one, more = ("process", "processes") if on_cpus else ("GPU", "GPUs")
    return one if count == 1 else more

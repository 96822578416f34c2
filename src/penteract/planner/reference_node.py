"""A node to price what depends on no cluster: memory, FLOPs and traffic."""

from __future__ import annotations

from penteract.config.hardware import Cluster, reference


def reference_node(gpus: int) -> Cluster:
    """So many of the reference's GPUs in one node."""
    curves = reference()
    return Cluster(name="reference", gpus=gpus, gpu=curves.gpu, inside=curves.inside, curves=curves)

"""The GPU of a rank on this host, the cluster of them that a run has, and the time that is planned for it there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penteract.config.hardware import Cluster, cluster
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.readings.estimator import Estimator
from penteract.units import Bytes, Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The GPU of a rank on this host. `packages`: kernel libraries that are installed. `peers`: how many GPUs of the
    host NVLink joins, so that ranks can read each other's memory; 0: not all. `host_ranks`: how many ranks of a run are
    known to share the host."""

    name: str
    free: Bytes
    capability: tuple[int, int]
    packages: frozenset[str]
    peers: int = 0
    host_ranks: int = 1


def cluster_of(card: Card | None, world: int, environment: Mapping[str, str]) -> Cluster | None:
    """The cluster of a run's ranks, by the name that the driver gives its cards; None where the catalog has no such."""
    if card is None:
        return None
    here = environment.get("LOCAL_WORLD_SIZE", "")
    each = int(here) if here.isdecimal() and 0 < int(here) <= world and world % int(here) == 0 else world
    size = re.search(r"(\d+)\s?GB\b", card.name)
    for word in re.findall(r"[A-Z]+\d+\w*", card.name):
        for name in ([f"{word}-{size[1]}GB"] if size else []) + [f"{word}-PCIe"] * ("PCIe" in card.name) + [word]:
            try:
                return cluster(f"{world // each}x{each}x{name}")
            except BadInput:
                continue
    return None


def planned_seconds(run: RunSpec, nodes: Cluster) -> Seconds:
    """The time of a run's step there. Raises BadInput where the cluster's GPUs have no products in its precision."""
    estimator = Estimator.of_run(run, nodes)
    return estimator.time(estimator.estimate(run.layout)).seconds

"""Memory of a GPU beside tensors: workspaces of libraries, the CUDA context, NCCL's communicators.

All of these are of the machine and its libraries, and were measured on it (`[process]` of its hardware file); what
follows from the layout is how many communicators a rank opens. An estimate's `allocated` has none of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penteract.config.files.hardware_schema import FURTHER
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.readings.buckets.planned import first_rank
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.rank_traffic import traffic
from penteract.units import MIB, Bytes

MESSAGES = ("send", "recv")


class ProcessMemory(NamedTuple):
    """Bytes of the fullest GPU: `reserved` by torch's allocator, and of the `device`, all that a process has there."""

    reserved: Bytes
    device: Bytes


class Communicators(NamedTuple):
    """What a rank opens: communicators of collectives, and channels of messages between pipeline ranks. `mixed`: of
    the first, whether one also carries messages, as all_to_all and ring attention do. `further`: over all channels, the
    ranks that it sends to or receives from, but the first of each."""

    collectives: int
    messages: int
    mixed: bool = False
    further: int = 0


def communicators(estimator: Estimator, layout: Layout, rank: int = 0) -> Communicators:
    """Of one rank: NCCL opens one when a group is called for the first time. Values and their gradients have channels
    of their own, so that neither waits for the other."""
    if layout.world == 1:
        return Communicators(0, 0)
    found = traffic(estimator.steps, layout, rank).found
    groups = {frozenset(one.ranks) for one in found if one.collective not in MESSAGES}
    between = defaultdict[str, set[int]](set)
    for one in found:
        if one.collective in MESSAGES and one.axis == "pp":
            between[one.what.rpartition(" ")[2]].update(set(one.ranks) - {rank})
    mixed = any(one.collective == "all_to_all" or (one.collective in MESSAGES and one.axis != "pp") for one in found)
    further = sum(len(neighbours) - 1 for neighbours in between.values())
    return Communicators(len(groups), len(between), mixed, further)


def _unlike(by_pp_rank: Sequence[Bytes]) -> Iterator[int]:
    """The pipeline ranks at both ends, and the fullest of those between them, which all open the same."""
    first, *inner = range(len(by_pp_rank))
    yield first
    if inner:
        yield inner.pop()
        if inner:
            yield max(inner, key=by_pp_rank.__getitem__)


def process_memory(estimator: Estimator, estimate: LayoutEstimate) -> ProcessMemory | None:
    """What a rank's process takes of its GPU; None where that was not measured: on other GPUs, where a communicator of
    collectives carries messages too, and where registers have the size that routing gives them."""
    if estimator.cluster.curves is None or not (sizes := dict(estimator.cluster.curves.process)):
        return None
    if estimate.layout.ep > 1:
        return None
    layout, device = estimate.layout, 0
    workspace = sizes["workspace"] + sizes["fp8_workspace"] * (estimator.policy.fp8 is not None)
    kept = int(MIB * (workspace + sizes["cached"]))
    for pp_rank in _unlike(estimate.by_pp_rank):
        opened = communicators(estimator, layout, first_rank(Mesh(layout), pp_rank))
        if opened.mixed or (opened.further and FURTHER not in sizes):
            return None
        others = sizes["context"] + sizes["communicator"] * opened.collectives + sizes["channel"] * opened.messages
        others += sizes["first_communicator"] * (opened.collectives + opened.messages > 0)
        others += sizes["first_channel"] * (opened.messages > 0) + sizes.get(FURTHER, 0.0) * opened.further
        device = max(device, estimate.by_pp_rank[pp_rank] + kept + int(MIB * others))
    return ProcessMemory(estimate.allocated + kept, device)

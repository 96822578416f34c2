"""If nothing fits: how many more of the same GPUs would be enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from penteract.config.catalog.hardware import tables
from penteract.config.files.hardware_schema import GPUS
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import ZERO_STAGES, Layout
from penteract.config.precision.policy import Policy
from penteract.planner.ask import Ask, Values
from penteract.planner.search.priced import unfit
from penteract.planner.space.layouts import Space
from penteract.readings.estimator import Estimator, LayoutEstimate
from penteract.readings.memory.rank_memory import RankMemory

Make = Callable[[Ask], Estimator]  # makes the estimator of a question

_LARGEST = 64  # times the GPUs of the question
_TIMES = " × "
_STATE = ("parameters", "gradients", "optimizer")


def larger_cluster(ask: Ask, make: Make) -> tuple[Cluster, LayoutEstimate] | None:
    """The smallest cluster of these GPUs on which some layout fits, and such a layout. None if 64 times as many are not
    enough.

    The search takes ever larger steps until one fits, then bisects. It passes over numbers of GPUs that divide neither
    the batch nor the layers.
    """
    of, prices = ask.cluster, {each.precision: make(each) for each in ask.each}  # memory does not depend on the cluster
    sizes = _sizes(of)

    def fits(first: int, behind: int) -> tuple[int, tuple[Cluster, LayoutEstimate] | None]:
        """The first size that some layout divides, or `behind`; and the layout, if it fits."""
        for i in range(first, behind):
            if any(True for _ in _least(replace(ask, cluster=_with(of, sizes[i])))):
                return i, _fits(ask, _with(of, sizes[i]), prices, make)
        return behind, None

    few, (enough, found) = -1, fits(0, len(sizes))  # the largest that is too small; the smallest that fits
    while found is None:
        if enough >= len(sizes) - 1:
            return None
        few = enough
        enough, found = fits(min(2 * few + 2, len(sizes) - 1), len(sizes))
    while enough - few > 1:
        half = (few + enough) // 2
        i, fewer = fits(half, enough)
        if fewer is not None:
            found = fewer
        few, enough = (few, half) if fewer is not None or i == enough else (i, enough)
    return found


def larger_fix(larger: Cluster) -> str:
    """The option that plans for a larger cluster; of a file of `calibrate`, no option says how many there are."""
    return f"more GPUs ({larger.name} would do)" if _TIMES in larger.name else f"--gpus {larger.name}"


def _fits(
    ask: Ask, on: Cluster, prices: Mapping[Policy, Estimator], make: Make
) -> tuple[Cluster, LayoutEstimate] | None:
    """A layout that fits such a cluster, in any of the precisions."""
    for grown in replace(ask, cluster=on).each:
        if found := _frugal(grown, prices[grown.precision]):
            return grown.cluster, make(grown).estimate(*found)
    return None


def _frugal(ask: Ask, prices: Estimator) -> tuple[Layout, RankMemory] | None:
    """A layout that fits, among those that need least: one sequence per micro-batch, full recomputation, ZeRO-3.

    State does not depend on the context degree: if it is too large for one, it is for all.
    """
    hopeless = set[tuple[int, ...]]()
    for lay in sorted(_least(ask), key=lambda lay: (lay.cp, lay.tp * lay.pp, lay.pp)):
        cut = (lay.tp, lay.pp, lay.ep, lay.expert_tp)
        if cut in hopeless or (ask.precision.fp8 and unfit(prices, lay)):
            continue
        memory = prices.memory_of(lay)
        if memory.allocated <= ask.usable and ask.cluster.host_holds(memory.host):
            return lay, memory
        if sum(memory.kinds.get(kind, 0) for kind in _STATE) > ask.usable:
            hopeless.add(cut)
    return None


def _least(ask: Ask) -> Iterator[Layout]:
    """Of each mesh, a layout that needs least."""
    plain = Layout()
    least: Mapping[str, Values] = {
        "micro_batch_size": (1,), "recompute": ("full",), "zero": (ZERO_STAGES[-1],), "schedule": (plain.schedule,),
        "cp_method": (plain.cp_method,), "reduce_scatter_once": (False,), "shard_group": (0,),
    }  # fmt: skip
    families = Space(replace(ask, pins={**least, **ask.pins})).families(Counter())
    return (run[0] for family in families for run in family.runs())


def _sizes(of: Cluster) -> Sequence[int]:
    """Larger numbers of these GPUs, in order: first those that fill a node, then whole nodes. Of a cluster that the
    catalogue does not know, multiples."""
    most = int(min(_LARGEST * of.gpus, GPUS.most))
    if not (each := _node(of)):
        return range(2 * of.gpus, most + 1, of.gpus)
    return [*range(of.gpus + 1, each), *range(of.gpus // each * each + each, most + 1, each)]


def _node(of: Cluster) -> int:
    """How many GPUs a node of a larger cluster has: as many as these nodes, or the usual number if this is part of one.
    0: the catalogue does not know."""
    if of.gpu is None or of.gpu.name not in tables("nodes"):
        return 0
    return of.gpus_per_node if of.gpus > of.gpus_per_node else int(tables("nodes")[of.gpu.name]["gpus_per_node"])


def _with(of: Cluster, gpus: int) -> Cluster:
    """A cluster of `gpus` of these GPUs."""
    each = _node(of)
    if not each or of.gpu is None:
        return replace(of, gpus=gpus, name=f"{gpus // of.gpus}{_TIMES}{of.name}")
    made = cluster(f"{gpus // each}x{each}x{of.gpu.name}" if gpus > each else f"{gpus}x{of.gpu.name}")
    return replace(made, memory_gib=of.memory_gib, host_memory_gib=of.host_memory_gib)

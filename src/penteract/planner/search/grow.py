"""If nothing fits: how many more of the same GPUs would be enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import ZERO_STAGES, Layout
from penteract.errors import BadInput
from penteract.planner.ask import Ask, Values
from penteract.planner.search.priced import unfit
from penteract.planner.space.layouts import Space
from penteract.readings.estimator import Estimator, LayoutEstimate

Make = Callable[[Ask], Estimator]  # makes the estimator of a question

_LARGEST = 64  # times the GPUs of the question
_TIMES = " × "
_STATE = ("parameters", "gradients", "optimizer")


def larger_cluster(ask: Ask, make: Make) -> tuple[Cluster, LayoutEstimate] | None:
    """The smallest multiple (2, 4, … times) of the GPUs on which some layout fits, and such a layout.

    None if 64 times as many are not enough.
    """
    times = 2
    while times <= _LARGEST:
        for grown in replace(ask, cluster=_times(ask.cluster, times)).each:
            if found := _frugal(grown, make):
                return grown.cluster, found
        times *= 2
    return None


def larger_fix(larger: Cluster) -> str:
    """The option that plans for a larger cluster; of a file of `calibrate`, no option says how many there are."""
    return f"more GPUs ({larger.name} would do)" if _TIMES in larger.name else f"--gpus {larger.name}"


def _frugal(ask: Ask, make: Make) -> LayoutEstimate | None:
    """A layout that fits, among those that need least: one sequence per micro-batch, full recomputation, ZeRO-3.

    State does not depend on the context degree: if it is too large for one, it is for all.
    """
    plain = Layout()
    least: Mapping[str, Values] = {
        "micro_batch_size": (1,), "recompute": ("full",), "zero": (ZERO_STAGES[-1],), "schedule": (plain.schedule,),
        "cp_method": (plain.cp_method,), "reduce_scatter_once": (False,), "shard_group": (0,),
    }  # fmt: skip
    families = Space(replace(ask, pins={**least, **ask.pins})).families(Counter())
    first = (run[0] for family in families for run in family.runs())
    layouts = sorted(first, key=lambda lay: (lay.cp, lay.tp * lay.pp, lay.pp))
    prices, hopeless = make(ask), set[tuple[int, ...]]()
    for lay in layouts:
        cut = (lay.tp, lay.pp, lay.ep, lay.expert_tp)
        if cut in hopeless or (ask.precision.fp8 and unfit(prices, lay)):
            continue
        estimate = prices.estimate(lay)
        if estimate.allocated <= ask.usable and ask.cluster.host_holds(estimate.host):
            return estimate
        if sum(estimate.memory.get(kind, 0) for kind in _STATE) > ask.usable:
            hopeless.add(cut)
    return None


def _times(of: Cluster, times: int) -> Cluster:
    """A cluster with `times` as many GPUs, in the usual nodes of this GPU."""
    gpus = of.gpus * times
    if of.gpu is not None:
        try:
            made = cluster(f"{gpus}x{of.gpu.name}")
            return replace(made, memory_gib=of.memory_gib, host_memory_gib=of.host_memory_gib)
        except BadInput:  # not a device of the catalogue, or no whole nodes of it
            pass
    return replace(of, gpus=gpus, name=f"{times}{_TIMES}{of.name}")

"""1F1B: backward starts as soon as possible, so that no rank keeps more than pp activations."""

from __future__ import annotations

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def one_f_one_b(pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021, 2104.04473 §2.2.1).

    Rank r first runs the pp-r-1 forwards that fill the later ranks. The bubble is that of GPipe; rank r keeps
    min(pp-r, num_micro_batches) activations instead of `num_micro_batches`.
    """
    return [_rank(min(pp - rank - 1, num_micro_batches), num_micro_batches) for rank in range(pp)]


def _rank(warmup: int, num_micro_batches: int) -> ComputeList:
    actions: ComputeList = [Compute("Fwd", m) for m in range(warmup)]
    for m in range(num_micro_batches):
        if m + warmup < num_micro_batches:
            actions.append(Compute("Fwd", m + warmup))
        actions.append(Compute("Bwd", m))
    return actions


ONE_F_ONE_B = Schedule(name="1f1b", compute=one_f_one_b)

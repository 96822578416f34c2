"""ZB-H1: delayed weight gradients fill part of the bubble."""

from __future__ import annotations

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def zero_bubble_h1(pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """1F1B with split backward (ZB-H1, Qi et al. 2024, 2401.10241 §2.2).

    Rank r delays its weight gradients by r micro-batches. Later ranks, which keep little in 1F1B, so keep as much as
    rank 0, pp activations, and end with r+1 weight gradients while the last input gradient travels to rank 0. With
    forward = input = weight = 1 the bubble falls from 3(pp-1) to pp-1.
    """
    m = num_micro_batches
    return [_rank(min(pp - rank - 1, m), min(rank, m), m) for rank in range(pp)]


def _rank(warmup: int, late: int, num_micro_batches: int) -> ComputeList:
    actions: ComputeList = [Compute("Fwd", m) for m in range(warmup)]
    for m in range(num_micro_batches):
        if m + warmup < num_micro_batches:
            actions.append(Compute("Fwd", m + warmup))
        actions.append(Compute("Inp", m))
        if m >= late:
            actions.append(Compute("Wgt", m - late))
    return actions + [Compute("Wgt", m) for m in range(num_micro_batches - late, num_micro_batches)]


ZB_H1 = Schedule(name="zb_h1", compute=zero_bubble_h1, split_backward=True)

"""ZB-H1: delayed weight gradients fill part of the bubble."""

from __future__ import annotations

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def zero_bubble_h1(pp: int, vpp: int, micros: int) -> list[ComputeList]:
    """1F1B with split backward (ZB-H1, Qi et al. 2024, 2401.10241 §2.2).

    Rank r delays its weight gradients by r micro-batches. Later ranks, which keep little in 1F1B, so keep as much as
    rank 0, pp activations, and end with r+1 weight gradients while the last input gradient travels to rank 0. With
    forward = input = weight = 1 the bubble falls from 3(pp-1) to pp-1.
    """
    return [_rank(min(pp - rank - 1, micros), min(rank, micros), micros) for rank in range(pp)]


def _rank(warmup: int, late: int, micros: int) -> ComputeList:
    actions: ComputeList = [Compute("Fwd", m) for m in range(warmup)]
    for m in range(micros):
        if m + warmup < micros:
            actions.append(Compute("Fwd", m + warmup))
        actions.append(Compute("Inp", m))
        if m >= late:
            actions.append(Compute("Wgt", m - late))
    return actions + [Compute("Wgt", m) for m in range(micros - late, micros)]


ZB_H1 = Schedule(name="zb_h1", compute=zero_bubble_h1, split_backward=True)

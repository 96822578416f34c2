"""Interleaved 1F1B: several chunks per rank divide the bubble by their number, at the cost of memory and messages."""

from __future__ import annotations

from math import inf

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def interleaved(pp: int, vpp: int, micros: int) -> list[ComputeList]:
    """1F1B over vpp chunks per rank (Narayanan et al. 2021, 2104.04473 §2.2.2); `micros` is a multiple of pp.

    Micro-batches go in groups of pp: a group passes through chunk 0, then chunk 1, and so on, so a value that leaves
    the last rank finds the first rank free for its next chunk. Backward mirrors it.
    """
    order = [(m, c) for group in range(0, micros, pp) for c in range(vpp) for m in range(group, group + pp)]
    forward = [Compute("Fwd", m, c) for m, c in order]
    backward = [Compute("Bwd", m, vpp - 1 - c) for m, c in order]
    return [_rank(forward, backward, warmup_of(rank, pp, vpp)) for rank in range(pp)]


def warmup_of(rank: int, pp: int, vpp: int) -> int:
    """Forwards before the first forward-backward pair.

    One group through all chunks but the last, then two for every later rank: one for the forward on its way to the last
    rank, one for the gradient on its way back.
    """
    return (vpp - 1) * pp + 2 * (pp - 1 - rank)


def _rank(forward: list[Compute], backward: list[Compute], warmup: int) -> ComputeList:
    actions: ComputeList = [*forward[:warmup]]
    for ahead, back in zip(forward[warmup:], backward, strict=False):
        actions += [ahead, back]
    return actions + backward[len(forward[warmup:]) :]


INTERLEAVED = Schedule(name="interleaved", compute=interleaved, least_pp=2, least_vpp=2, most_vpp=inf, rounds=True)

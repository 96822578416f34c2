"""Interleaved 1F1B: several chunks per rank divide the bubble by their number, at the cost of memory and messages."""

from __future__ import annotations

from math import inf

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def interleaved(pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """1F1B over vpp chunks per rank (Narayanan et al. 2021, 2104.04473 §2.2.2), for a multiple of pp micro-batches.

    Micro-batches go in groups of pp: a group passes through chunk 0, then chunk 1, and so on, so a value that leaves
    the last rank finds the first rank free for its next chunk. Backward mirrors it. With pp = 2, vpp = 2 and four
    micro-batches (`F2.1`: chunk 1 of micro-batch 2):

        rank 0  F0  F1  F0.1F1.1F2  ....B0.1----F3  B1.1----....F2.1B0  ----F3.1B1  ----B2.1----....B3.1----B2  ----…
        rank 1  ....F0  F1  F0.1B0.1----F1.1B1.1----F2  B0  ----F3  B1  ----F2.1B2.1----F3.1B3.1----B2  ----B3  ----…
    """
    order = [(m, c) for group in range(0, num_micro_batches, pp) for c in range(vpp) for m in range(group, group + pp)]
    forwards = [Compute("Fwd", m, c) for m, c in order]
    backwards = [Compute("Bwd", m, vpp - 1 - c) for m, c in order]
    return [_one_f_one_b(forwards, backwards, warmup_of(rank, pp, vpp)) for rank in range(pp)]


def warmup_of(rank: int, pp: int, vpp: int) -> int:
    """Warm-up forwards of a rank (Megatron's `num_warmup_microbatches`): pp for each chunk but the last, and two for
    each later rank (forward down, gradient back). With few micro-batches it is capped at all forwards."""
    return (vpp - 1) * pp + 2 * (pp - 1 - rank)


def _one_f_one_b(forwards: list[Compute], backwards: list[Compute], warmup: int) -> ComputeList:
    actions: ComputeList = [*forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards[warmup:]) :]


INTERLEAVED = Schedule(
    name="interleaved", compute=interleaved, min_pp=2, min_vpp=2, max_vpp=inf, needs_multiple_of_pp=True
)

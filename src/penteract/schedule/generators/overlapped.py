"""One stage, two micro-batches at a time: one computes while the other communicates."""

from __future__ import annotations

from penteract.schedule.actions import Compute, ComputeList, Overlapped
from penteract.schedule.schedule import Schedule


def overlapped(pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """F0, B0|F1, B1|F2, ..., B_last on a single pipeline rank; at most two activations are alive.

    The pairing is that of DualPipe (DeepSeek-V3, 2412.19437 §3.2.1) without its pipeline.
    """
    pairs = [Overlapped(Compute("Bwd", m), Compute("Fwd", m + 1)) for m in range(num_micro_batches - 1)]
    return [[Compute("Fwd", 0), *pairs, Compute("Bwd", num_micro_batches - 1)]]


OVERLAPPED = Schedule(name="overlapped", compute=overlapped, max_pp=1, overlapped=True)

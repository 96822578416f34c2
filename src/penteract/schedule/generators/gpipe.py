"""GPipe: all forwards, then all backwards. The simplest schedule; it keeps the most activations."""

from __future__ import annotations

from math import inf

from penteract.schedule.actions import Compute, ComputeList
from penteract.schedule.schedule import Schedule


def gpipe(pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """Every forward, then every backward (GPipe, Huang et al. 2019, 1811.06965).

    With several chunks it is breadth first (Lamy-Poirier 2023, 2211.05953): all micro-batches through one chunk, then
    the next. Keeps num_micro_batches·vpp activations on every rank.
    """
    forward = [Compute("Fwd", m, c) for c in range(vpp) for m in range(num_micro_batches)]
    backward = [Compute("Bwd", m, c) for c in reversed(range(vpp)) for m in range(num_micro_batches)]
    return [[*forward, *backward] for _ in range(pp)]


ALL_FORWARD = Schedule(name="gpipe", compute=gpipe, max_vpp=inf, alternates=False)

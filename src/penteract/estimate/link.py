"""How long compute waits for copies to and from the host: a stage's pass as the tape writes it, layer after layer.

What leaves has the time of its own layer and of the next that has some; what comes back, that of the layers between it
and the one before it in backward, and the first of all only what runs before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from penteract.estimate.timing import Timed
from penteract.units import Seconds

Window = tuple[Seconds, Seconds]  # of a piece: its compute, and the copies that are its own


def waits(row: Sequence[Timed]) -> dict[str, Seconds]:
    """What a pass through a stage's pieces waits for copies, by action."""
    found = dict[str, Seconds]()
    for action in {action for timed in row for action in timed.copies}:
        windows = [(timed.seconds.get(action, 0.0), timed.copies.get(action, 0.0)) for timed in row]
        found[action] = waits_away(windows) if action == "Fwd" else waits_back(windows[::-1])
    return found


def waits_away(row: Sequence[Window]) -> Seconds:
    """What a forward pass waits for copies to the host."""
    now = lands = 0.0
    for compute, copies in row:
        begun, now = now, now + compute
        if copies:
            now = max(now, lands)
            lands = max(begun, lands) + copies
    return max(now, lands) - fsum(compute for compute, _ in row)


def waits_back(row: Sequence[Window]) -> Seconds:
    """What a backward pass, its pieces in the order in which they run, waits for copies from the host."""
    coming = iter([copies for _, copies in row if copies])
    now, lands = 0.0, next(coming, 0.0)
    for compute, copies in row:
        if copies:
            now = max(now, lands)
            lands = now + next(coming, 0.0)
        now += compute
    return now - fsum(compute for compute, _ in row)

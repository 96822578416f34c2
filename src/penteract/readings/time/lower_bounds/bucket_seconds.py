"""Seconds of the bucket events of pipeline ranks, as sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penteract.units import Seconds

Ranks = tuple[int, ...]  # of a stream


class Once(NamedTuple):
    """Seconds of a rank's bucket events.

    update      the update, after the norm is known; `measure`: the sums of squares before it
    sums        reductions once a step, on the busiest stream: none begins before the last micro-batch
    accumulate  adding reduced gradients in each micro-batch, where they are sharded; `wires`: their reductions in each
                micro-batch, on each stream
    wires_once  collectives once a step, on each stream
    """

    update: Seconds
    measure: Seconds
    sums: Seconds
    accumulate: Seconds
    wires: Mapping[Ranks, Seconds]
    wires_once: Mapping[Ranks, Seconds]


class Gathered(NamedTuple):
    """A unit whose parameters are sharded: the actions that read these, and the seconds of an all-gather on each
    stream."""

    read: frozenset[str]
    wires: tuple[tuple[Ranks, Seconds], ...]


def sums_of(units: Sequence[Gathered], counts: Sequence[int]) -> Mapping[Ranks, Seconds]:
    """Seconds of these gathers, on each stream."""
    out: defaultdict[Ranks, Seconds] = defaultdict(float)
    for own, n in zip(units, counts, strict=True):
        for ranks, seconds in own.wires:
            out[ranks] += n * seconds
    return out

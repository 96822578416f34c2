"""Seconds of passes: of one micro-batch in each model chunk, and on the ranks that have these chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import NamedTuple

from penteract.units import Seconds

Pass = Mapping[str, Seconds]  # of one micro-batch in a chunk, by action
# With what of each action may come before its message, its waits, its losses, its slack, and the host's seconds.
Chunk = tuple[Pass, Pass, Seconds, Seconds, Seconds, Seconds]


class PlayedPasses(NamedTuple):
    """What a schedule is played with: the seconds of each action, by chunk; `early`: those that may come before its
    message, as recomputation does."""

    chunks: tuple[Pass, ...]
    early: tuple[Pass, ...]


class Passes(NamedTuple):
    """Seconds of one micro-batch, on ranks with the same stages.

    work   all its passes; `tail`: the backward pass, if there is one chunk: no gradient is complete before it begins
    late   delayed weight gradients, which may come after the input gradient was sent
    on     the forward of the first chunk, once its input is there; `off`: its backward, without weight gradients
    waits  waits within the passes, without `slack`: waits that more work shortens; `lost`: beside their own collectives
    host   seconds of the host
    played of each action
    """

    work: Seconds
    tail: Seconds | None
    late: Seconds
    on: Seconds
    off: Seconds
    waits: Seconds
    lost: Seconds
    slack: Seconds
    host: Seconds
    played: PlayedPasses


def of_group(own: Sequence[Chunk]) -> Passes:
    """Sum the chunks of a rank."""
    passes, early, waits, lost, slack, host = zip(*own, strict=True)
    first, ahead = passes[0], fsum([s for action, s in early[0].items() if action != "Fwd"])
    # With several chunks, or a split backward, some gradients are complete long before the end.
    tail = first.get("Bwd") if len(own) == 1 else None
    work, late = (
        fsum([s for chunk in passes for s in chunk.values()]),
        fsum([chunk.get("Wgt", 0.0) for chunk in passes]),
    )
    on, off = first["Fwd"] - early[0].get("Fwd", 0.0), first.get("Bwd", 0.0) + first.get("Inp", 0.0) - ahead
    return Passes(work, tail, late, on, off, sum(waits), sum(lost), sum(slack), sum(host), PlayedPasses(passes, early))

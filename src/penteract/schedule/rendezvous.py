"""Run action lists in a world where a message has nowhere to wait: it moves when both ranks stand at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from penteract.errors import Bug
from penteract.schedule.actions import ActionList, Compute, Exchange, Transfer, Woven, computes
from penteract.schedule.program import Message, message_of

Cost = Callable[[int, Compute], float]  # (rank, walk) -> its time


@dataclass(frozen=True, slots=True)
class Span:
    """When one action ran. An exchange lasts from when it is posted until its last message is done."""

    action: Compute | Woven | Exchange
    start: float
    end: float


def unit_cost(rank: int, compute: Compute) -> float:
    """Forward, input and weight gradient each take 1, on every rank."""
    return 2.0 if compute.kind == "Bwd" else 1.0


def rendezvous(lists: Sequence[ActionList], cost: Cost, wire: float) -> list[list[Span]]:
    """When every action runs, by rank. Ranks never choose, so there is one outcome, whatever order we look at them in.

    Raises Bug("SCHEDULE") with the cycle of ranks when they wait for each other.
    """
    pp = len(lists)
    spans: list[list[Span]] = [[] for _ in lists]
    posted: dict[tuple[Message, int], float] = {}  # (message, rank) -> when that rank came to it
    awake = list(range(pp))
    while awake:
        rank = awake.pop()
        while len(spans[rank]) < len(lists[rank]):
            action = lists[rank][len(spans[rank])]
            start = spans[rank][-1].end if spans[rank] else 0.0
            if isinstance(action, Exchange):
                both = [(message_of(t, rank, pp), t.peer) for t in action.transfers]
                for message, peer in both:
                    if (message, rank) not in posted:
                        posted[message, rank] = start
                        awake.append(peer)
                if not all(pair in posted for pair in both):
                    break
                end = max([start, *(max(start, posted[pair]) + wire for pair in both)])
            else:
                end = start + sum(cost(rank, part) for part in computes(action))
            spans[rank].append(Span(action, start, end))
    if any(len(done) < len(actions) for done, actions in zip(spans, lists, strict=True)):
        _deadlock(lists, [len(done) for done in spans], posted)
    return spans


def _deadlock(lists: Sequence[ActionList], at: list[int], posted: dict[tuple[Message, int], float]) -> NoReturn:
    """Follow who waits for whom until a rank comes twice, and name that cycle."""
    rank = next(r for r, actions in enumerate(lists) if at[r] < len(actions))
    path: list[tuple[int, Transfer]] = []
    while rank not in [r for r, _ in path]:
        action = lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None
        if not isinstance(action, Exchange):
            raise Bug("SCHEDULE", f"{path[-1][1]} is never met, its peer is done", where=f"rank {path[-1][0]}")
        waits = next(t for t in action.transfers if (message_of(t, rank, len(lists)), t.peer) not in posted)
        path.append((rank, waits))
        rank = waits.peer
    cycle = path[[r for r, _ in path].index(rank) :]
    raise Bug("SCHEDULE", "deadlock", found="; ".join(f"rank {r} waits in {waits}" for r, waits in cycle))

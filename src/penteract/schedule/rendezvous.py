"""Run action lists with unbuffered messages: a message moves when both its ranks have come to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from penteract.errors import Bug
from penteract.schedule.actions import ActionList, Compute, Overlapped, P2PBatch, Transfer, computes
from penteract.schedule.schedule import Placement
from penteract.schedule.schedule_state import Message, message_of

Cost = Callable[[int, Compute], float]  # (rank, walk) -> its time


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When one action ran. A P2P batch lasts from when it is posted until its last message is done."""

    action: Compute | Overlapped | P2PBatch
    start: float
    end: float


def unit_cost(rank: int, compute: Compute) -> float:
    """Forward, input and weight gradient each take 1, on every rank."""
    return 2.0 if compute.kind == "Bwd" else 1.0


@dataclass(frozen=True, slots=True)
class TotalOrder:
    """The actions of all ranks in one order, each after all that it waits for. No cost can change it.

    Moments are numbered: the start of rank r is r, the end of the i-th step is ranks + i.

    steps   (rank, action)
    after   the moment at which the rank is ready for the step: it then starts, or posts its P2P batch
    meets   the moments at which its peers post a P2P batch; empty for other actions
    """

    ranks: int
    steps: tuple[tuple[int, Compute | Overlapped | P2PBatch], ...]
    after: tuple[int, ...]
    meets: tuple[tuple[int, ...], ...]

    def ends(self, took: Iterable[float], wire: float) -> list[float]:
        """The time of each moment. `took`: seconds of each step; ignored for a P2P batch."""
        at = [0.0] * self.ranks
        for after, meets, seconds in zip(self.after, self.meets, took, strict=True):
            at.append(max(at[after], *[at[i] for i in meets]) + wire if meets else at[after] + seconds)
        return at

    def last(self) -> list[int]:
        """The last moment of each rank."""
        last = list(range(self.ranks))
        for moment, (rank, _) in enumerate(self.steps, self.ranks):
            last[rank] = moment
        return last


def order(lists: Sequence[ActionList], placement: Placement) -> TotalOrder:
    """Ranks make no choices, so the outcome does not depend on the order in which they are visited here.

    Raises Bug("SCHEDULE") with the cycle of ranks if they wait for each other.
    """
    pp = len(lists)
    steps, after, meets = list[tuple[int, Compute | Overlapped | P2PBatch]](), list[int](), list[tuple[int, ...]]()
    at, now = [0] * pp, list(range(pp))  # by rank: its next action, and its current moment
    posted: dict[tuple[Message, int], int] = {}  # (message, rank) -> the moment at which that rank came to it
    awake = list(range(pp))
    while awake:
        rank = awake.pop()
        actions = lists[rank]
        while at[rank] < len(actions):
            action, met = actions[at[rank]], ()
            if isinstance(action, P2PBatch):
                both = [(message_of(t, rank, placement), t.peer) for t in action.transfers]
                for message, peer in both:
                    if (message, rank) not in posted:
                        posted[message, rank] = now[rank]
                        awake.append(peer)
                met = tuple([posted[pair] for pair in both if pair in posted])
                if len(met) < len(both):
                    break
            steps.append((rank, action))
            after.append(now[rank])
            meets.append(met)
            at[rank], now[rank] = at[rank] + 1, pp + len(steps) - 1
    if any(done < len(actions) for done, actions in zip(at, lists, strict=True)):
        _deadlock(lists, placement, at, posted)
    return TotalOrder(pp, tuple(steps), tuple(after), tuple(meets))


def rendezvous(lists: Sequence[ActionList], placement: Placement, cost: Cost, wire: float) -> list[list[ActionSpan]]:
    """When every action runs, by rank. Raises as `order`."""
    line = order(lists, placement)
    took = [sum(cost(rank, part) for part in computes(action)) for rank, action in line.steps]
    at = line.ends(took, wire)
    spans: list[list[ActionSpan]] = [[] for _ in lists]
    for (rank, action), after, end in zip(line.steps, line.after, at[line.ranks :], strict=True):
        spans[rank].append(ActionSpan(action, at[after], end))
    return spans


def _deadlock(
    lists: Sequence[ActionList], placement: Placement, at: list[int], posted: dict[tuple[Message, int], int]
) -> NoReturn:
    """Follow the waits from rank to rank until one repeats, and report that cycle."""
    rank = next(r for r, actions in enumerate(lists) if at[r] < len(actions))
    path: list[tuple[int, Transfer]] = []
    while rank not in [r for r, _ in path]:
        action = lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None
        if not isinstance(action, P2PBatch):
            raise Bug("SCHEDULE", f"{path[-1][1]} is never met, its peer is done", where=f"rank {path[-1][0]}")
        waits = next(t for t in action.transfers if (message_of(t, rank, placement), t.peer) not in posted)
        path.append((rank, waits))
        rank = waits.peer
    cycle = path[[r for r, _ in path].index(rank) :]
    raise Bug("SCHEDULE", "deadlock", found="; ".join(f"rank {r} waits in {waits}" for r, waits in cycle))

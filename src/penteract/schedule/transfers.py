"""From what each rank computes to what each rank does: the messages between stages put in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from penteract.errors import Bug
from penteract.schedule.actions import (
    ActionList,
    Compute,
    ComputeKind,
    ComputeList,
    Exchange,
    Payload,
    Transfer,
    Woven,
    computes,
    home_of,
    stage_of,
)

UNITS: dict[ComputeKind, int] = {"Fwd": 1, "Bwd": 2, "Inp": 1, "Wgt": 1}

_Message = tuple[Payload, int, int, int]  # what, micro, source stage, target stage
_Line = list[Compute | Woven | Transfer]  # one rank's events
_half = cache(Transfer)  # schedules of one pipeline have the same messages


def with_transfers(lists: Sequence[ComputeList], pp: int, vpp: int) -> list[ActionList]:
    """Compute lists -> action lists with every message between stages, free of deadlock without any buffer.

    Why: the lists are played in unit time, and each message is one event of both its ranks, at the first moment at
    which its producer has ended and both ranks are between walks. So all events stand in one line, and each rank takes
    its own in that order: the first event of the line that is not done can always be done, even if a send has to wait
    for its receive; and two ranks list the messages between them alike.

    Raises Bug("SCHEDULE") when the lists wait for each other.
    """
    play = _Play(lists, pp, pp * vpp)
    now: int | None = 0
    while now is not None:
        play.deliver(now)
        play.start(now)
        now = min((t for t in play.free_at if t > now), default=None)
    for rank, (actions, at) in enumerate(zip(lists, play.at, strict=True)):
        if at < len(actions):
            raise Bug("SCHEDULE", f"{actions[at]} can never start", where=f"rank {rank}")
    return [_grouped(line) for line in play.lines]


@dataclass(slots=True)
class _Play:
    """The state of all ranks at one moment, and the line of events so far as each rank sees it."""

    lists: Sequence[ComputeList]
    pp: int
    stages: int
    at: list[int] = field(init=False)  # how many actions each rank has started
    free_at: list[int] = field(init=False)  # when each rank's walk ends
    lines: list[_Line] = field(init=False)
    pending: list[_Message] = field(default_factory=list[_Message])  # produced, or being so
    arrived: set[_Message] = field(default_factory=set[_Message])

    def __post_init__(self) -> None:
        self.at, self.free_at = [0] * self.pp, [0] * self.pp
        self.lines = [[] for _ in range(self.pp)]

    def deliver(self, now: int) -> None:
        """Move every message whose two ranks are between walks, in one order for all."""
        later: list[_Message] = []
        for message in sorted(self.pending):
            what, micro, source, target = message
            (sender, produces), (receiver, consumes) = home_of(source, self.pp), home_of(target, self.pp)
            if max(self.free_at[sender], self.free_at[receiver]) > now:
                later.append(message)
                continue
            self.lines[sender].append(_half("Send", what, micro, produces, receiver))
            self.lines[receiver].append(_half("Recv", what, micro, consumes, sender))
            self.arrived.add(message)
        self.pending = later

    def start(self, now: int) -> None:
        """Start the next action of every rank that is free and has received what it needs."""
        for rank, actions in enumerate(self.lists):
            if self.free_at[rank] > now or self.at[rank] == len(actions):
                continue
            action = actions[self.at[rank]]
            parts = computes(action)
            if any(need not in self.arrived for part in parts for need in self._needs(rank, part)):
                continue
            self.at[rank] += 1
            self.free_at[rank] = now + sum(UNITS[part.kind] for part in parts)
            self.lines[rank].append(action)
            self.pending += [message for part in parts for message in self._gives(rank, part)]

    def _needs(self, rank: int, part: Compute) -> list[_Message]:
        """The message that `part` consumes: none for a weight gradient and at the ends of the pipeline."""
        stage = stage_of(rank, part.chunk, self.pp)
        if part.kind == "Fwd":
            return [("value", part.micro, stage - 1, stage)] if stage else []
        return [("gradient", part.micro, stage + 1, stage)] if part.kind != "Wgt" and stage + 1 < self.stages else []

    def _gives(self, rank: int, part: Compute) -> list[_Message]:
        """The message that `part` produces."""
        stage = stage_of(rank, part.chunk, self.pp)
        if part.kind == "Fwd":
            return [("value", part.micro, stage, stage + 1)] if stage + 1 < self.stages else []
        return [("gradient", part.micro, stage, stage - 1)] if part.kind != "Wgt" and stage else []


def _grouped(line: _Line) -> ActionList:
    """Transfers with no walk between them in one exchange, at most one to and one from each peer.

    Posting together asks for less than posting in turn (no member waits for another), so it cannot bring a deadlock.
    Messages of the same direction stay apart: then an exchange is matched by the order of messages alone.
    """
    result: ActionList = []
    together: list[Transfer] = []

    def post() -> None:
        if together:
            result.append(Exchange(tuple(together)))
            together.clear()

    for event in line:
        if not isinstance(event, Transfer):
            post()
            result.append(event)
            continue
        if any(t.kind == event.kind and t.peer == event.peer for t in together):
            post()
        together.append(event)
    post()
    return result

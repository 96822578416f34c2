"""From what each rank computes to what each rank does: the messages between stages put in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.errors import Bug
from penteract.schedule.actions import (
    ActionList,
    Compute,
    ComputeKind,
    ComputeList,
    Exchange,
    Overlapped,
    Payload,
    Transfer,
    computes,
)
from penteract.schedule.schedule import Placement

UNITS: dict[ComputeKind, int] = {"Fwd": 1, "Bwd": 2, "Inp": 1, "Wgt": 1}

_Message = tuple[Payload, int, int, int]  # what, micro, source stage, target stage
_Line = list[Compute | Overlapped | Transfer]  # one rank's events


class _Step(NamedTuple):
    """An action, how long it takes, and the messages that it waits for and gives."""

    action: Compute | Overlapped
    units: int
    needs: tuple[_Message, ...]
    gives: tuple[_Message, ...]


def with_transfers(lists: Sequence[ComputeList], placement: Placement) -> list[ActionList]:
    """Compute lists -> action lists with every message between stages, free of deadlock without any buffer.

    Why: the lists are played in unit time, and each message is one event of both its ranks, at the first moment at
    which its producer has ended and both ranks are between walks. So all events stand in one line, and each rank takes
    its own in that order: the first event of the line that is not done can always be done, even if a send has to wait
    for its receive; and two ranks list the messages between them alike.

    Raises Bug("SCHEDULE") when the lists wait for each other.
    """
    steps = [[_step(action, rank, placement) for action in actions] for rank, actions in enumerate(lists)]
    play = _Play(steps, placement.owning_stages)
    now: int | None = 0
    while now is not None:
        play.deliver(now)
        play.start(now)
        now = min([t for t in play.free_at if t > now], default=None)
    for rank, (actions, at) in enumerate(zip(lists, play.at, strict=True)):
        if at < len(actions):
            raise Bug("SCHEDULE", f"{actions[at]} can never start", where=f"rank {rank}")
    return [_grouped(line) for line in play.lines]


def _step(action: Compute | Overlapped, rank: int, placement: Placement) -> _Step:
    """A weight gradient has no message, nor have the ends of the pipeline beyond themselves."""
    units, needs, gives, stages = 0, list[_Message](), list[_Message](), len(placement.owning_stages)
    for kind, micro, chunk in computes(action):
        stage, units = placement.stages[rank][chunk], units + UNITS[kind]
        if kind == "Wgt":
            continue
        what, way = ("value", 1) if kind == "Fwd" else ("gradient", -1)
        if 0 <= stage - way < stages:
            needs.append((what, micro, stage - way, stage))
        if 0 <= stage + way < stages:
            gives.append((what, micro, stage, stage + way))
    return _Step(action, units, tuple(needs), tuple(gives))


@dataclass(slots=True)
class _Play:
    """The state of all ranks at one moment, and the line of events so far as each rank sees it."""

    steps: Sequence[Sequence[_Step]]
    home: Sequence[tuple[int, int]]  # of each stage: rank, chunk
    at: list[int] = field(init=False)  # how many actions each rank has started
    free_at: list[int] = field(init=False)  # when each rank's walk ends
    lines: list[_Line] = field(init=False)
    pending: list[_Message] = field(default_factory=list[_Message])  # produced, or being so
    arrived: set[_Message] = field(default_factory=set[_Message])

    def __post_init__(self) -> None:
        self.at, self.free_at = [0] * len(self.steps), [0] * len(self.steps)
        self.lines = [[] for _ in self.steps]

    def deliver(self, now: int) -> None:
        """Move every message whose two ranks are between walks, in one order for all."""
        later: list[_Message] = []
        for message in sorted(self.pending):
            what, micro, source, target = message
            (sender, produces), (receiver, consumes) = self.home[source], self.home[target]
            if self.free_at[sender] > now or self.free_at[receiver] > now:
                later.append(message)
                continue
            self.lines[sender].append(Transfer("Send", what, micro, produces, receiver))
            self.lines[receiver].append(Transfer("Recv", what, micro, consumes, sender))
            self.arrived.add(message)
        self.pending = later

    def start(self, now: int) -> None:
        """Start the next action of every rank that is free and has received what it needs."""
        for rank, steps in enumerate(self.steps):
            at = self.at[rank]
            if self.free_at[rank] > now or at == len(steps):
                continue
            action, units, needs, gives = steps[at]
            if self.arrived.issuperset(needs):
                self.at[rank] = at + 1
                self.free_at[rank] = now + units
                self.lines[rank].append(action)
                self.pending += gives


def _grouped(line: _Line) -> ActionList:
    """Transfers with no walk between them in one exchange, at most one to and one from each peer.

    They stay in the order of the line, in which each could be done before the next is posted: no member needs another.
    Messages of the same direction stay apart: then an exchange is matched by the order of messages alone.
    """
    result: ActionList = []
    together: dict[tuple[str, int], Transfer] = {}  # by direction and peer
    for event in line:
        if isinstance(event, Transfer):
            way = event.kind, event.peer
            if way in together:
                result.append(Exchange(tuple(together.values())))
                together = {}
            together[way] = event
            continue
        if together:
            result.append(Exchange(tuple(together.values())))
            together = {}
        result.append(event)
    if together:
        result.append(Exchange(tuple(together.values())))
    return result

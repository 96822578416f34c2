"""From compute lists to action lists: inserts the messages between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.errors import Bug
from penteract.schedule.actions import (
    ActionList,
    Compute,
    ComputeKind,
    ComputeList,
    Overlapped,
    P2PBatch,
    Payload,
    Transfer,
)
from penteract.schedule.schedule import Placement

UNITS: dict[ComputeKind, int] = {"Fwd": 1, "Bwd": 2, "Inp": 1, "Wgt": 1}

_Message = tuple[Payload, int, int, int]  # what, micro, source stage, target stage
_Line = list[Compute | Overlapped | Transfer]  # one rank's events


class _Step(NamedTuple):
    """An action, its duration, and the messages that it waits for and produces."""

    action: Compute | Overlapped
    units: int
    needs: tuple[_Message, ...]
    gives: tuple[_Message, ...]


class _Ends(NamedTuple):
    """Of a computation: its duration, what its messages carry, the stage from which one comes, its own stage, and the
    stage to which one goes; None if there is no message."""

    units: int
    what: Payload
    before: int | None
    stage: int
    after: int | None


def with_transfers(lists: Sequence[ComputeList], placement: Placement) -> list[ActionList]:
    """Compute lists -> action lists with all messages between stages, free of deadlock without any buffer.

    Why: the lists are simulated in unit time. Each message is one event on both its ranks, at the first moment when its
    producer has ended and both ranks are between actions. So all events are totally ordered, and each rank takes its
    own in that order. The first event that is not done can always be done, even if a send has to wait for its receive;
    and two ranks list the messages between them in the same order.

    Raises Bug("SCHEDULE") if the lists wait for each other.
    """
    steps: list[list[_Step]] = []
    for rank, actions in enumerate(lists):
        messages = _messages(rank, placement)
        steps.append([_step(action, messages) for action in actions])
    play = _Play(steps, placement.locations)
    now: int | None = 0
    while now is not None:
        play.deliver(now)
        play.start(now)
        now = min([t for t in play.free_at if t > now], default=None)
    for rank, (actions, at) in enumerate(zip(lists, play.at, strict=True)):
        if at < len(actions):
            raise Bug("SCHEDULE", f"{actions[at]} can never start", where=f"rank {rank}")
    return [_grouped(line) for line in play.lines]


def _messages(rank: int, placement: Placement) -> Mapping[tuple[ComputeKind, int], _Ends]:
    """The messages of each computation of a rank. A weight gradient has none; the first and last stage have none
    outwards."""
    found, stages = dict[tuple[ComputeKind, int], _Ends](), len(placement.locations)
    for chunk, stage in enumerate(placement.stages[rank]):
        for kind, units in UNITS.items():
            what, way = ("value", 1) if kind == "Fwd" else ("gradient", -1)
            before, after = (s if kind != "Wgt" and 0 <= s < stages else None for s in (stage - way, stage + way))
            found[kind, chunk] = _Ends(units, what, before, stage, after)
    return found


def _step(action: Compute | Overlapped, messages: Mapping[tuple[ComputeKind, int], _Ends]) -> _Step:
    """The action with its messages."""
    if isinstance(action, Overlapped):
        one, other = (_step(part, messages) for part in action)
        return _Step(action, one.units + other.units, one.needs + other.needs, one.gives + other.gives)
    kind, micro, chunk = action
    units, what, before, stage, after = messages[kind, chunk]
    return _Step(
        action, units, () if before is None else ((what, micro, before, stage),),
        () if after is None else ((what, micro, stage, after),),
    )  # fmt: skip


@dataclass(slots=True)
class _Play:
    """The state of all ranks at one moment, and each rank's events so far."""

    steps: Sequence[Sequence[_Step]]
    home: Sequence[tuple[int, int]]  # of each stage: rank, chunk
    at: list[int] = field(init=False)  # how many actions each rank has started
    free_at: list[int] = field(init=False)  # when each rank's action ends
    lines: list[_Line] = field(init=False)
    pending: list[_Message] = field(default_factory=list[_Message])  # produced, or being produced
    arrived: set[_Message] = field(default_factory=set[_Message])

    def __post_init__(self) -> None:
        self.at, self.free_at = [0] * len(self.steps), [0] * len(self.steps)
        self.lines = [[] for _ in self.steps]

    def deliver(self, now: int) -> None:
        """Move every message whose two ranks are between actions, in one global order."""
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
    """Groups adjacent transfers into P2P batches, each with at most one message to and one from each peer.

    They keep their order, in which each could be done before the next is posted: none depends on another in its group.
    Messages of the same direction and peer stay in separate P2P batches, so messages are matched only by their order.
    """
    result: ActionList = []
    together: dict[tuple[str, int], Transfer] = {}  # by direction and peer
    for event in line:
        if isinstance(event, Transfer):
            way = event.kind, event.peer
            if way in together:
                result.append(P2PBatch(tuple(together.values())))
                together = {}
            together[way] = event
            continue
        if together:
            result.append(P2PBatch(tuple(together.values())))
            together = {}
        result.append(event)
    if together:
        result.append(P2PBatch(tuple(together.values())))
    return result

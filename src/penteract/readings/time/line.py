"""A schedule as the clock plays it: of each pipeline rank its computations and its halves of messages, all numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from penteract.errors import Bug
from penteract.parallel.data import NONE
from penteract.schedule.actions import Compute, Exchange
from penteract.schedule.in_flight import action_lists, compute_lists
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.schedule.schedule import Placement
from penteract.schedule.schedule_state import message_of

_NOTHING = frozenset[int]()


class Post(NamedTuple):
    """A rank's half of an exchange: messages in the order in which they are posted, and which of them it sends."""

    messages: tuple[int, ...]
    sends: frozenset[int]


class NumberedMessage(NamedTuple):
    """`micro` and `where` (what it is, the stage that it comes from) name it; `both`: as much goes the other way."""

    source: int
    target: int
    micro: int
    where: tuple[str, int]
    both: bool


class Position(NamedTuple):
    """Where a rank is: what it does next, and its next computation."""

    item: int
    compute: int


class NumberedSchedule(NamedTuple):
    """A schedule with its messages numbered.

    todo      of each rank, in order: the number of a computation, or a post
    computes  of each rank; `asks`: the message that each reads, or `NONE`
    channels  of each message: those between two ranks, one way, go in order
    turns     where each turn of micro-batches begins, of each rank; `turn`: how many they are
    """

    todo: tuple[tuple[int | Post, ...], ...]
    computes: tuple[tuple[Compute, ...], ...]
    asks: tuple[tuple[int, ...], ...]
    messages: tuple[NumberedMessage, ...]
    turns: tuple[tuple[Position, ...], ...]
    turn: int
    channels: tuple[int, ...]


@cache
def line_of(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> NumberedSchedule:
    """The messages of a schedule, each once for its two ends."""
    lists, of = action_lists(schedule, pp, vpp, micros), schedule_of(schedule)
    placement, steady, turn = of.placement(pp, vpp), of.steady_after(pp, vpp), of.turn(pp, vpp)
    numbers, messages = dict[tuple[str, int, int], int](), list[NumberedMessage]()
    todo, computes = list[tuple[int | Post, ...]](), list[tuple[Compute, ...]]()
    for rank, actions in enumerate(lists):
        own, does = list[Compute](), list[int | Post]()
        for action in actions:
            match action:
                case Compute():
                    does.append(len(own))
                    own.append(action)
                case Exchange():
                    post = _post(action, rank, placement, numbers, messages)
                    does += [post] if post.messages else []
                case _:
                    raise Bug("SCHEDULE", "no layout names a schedule of overlapped passes", found=str(action))
        todo.append(tuple(does))
        computes.append(tuple(own))
    ways = {way: i for i, way in enumerate(dict.fromkeys((m.where[0], m.source, m.target) for m in messages))}
    channels = tuple([ways[m.where[0], m.source, m.target] for m in messages])
    turns = zip(*(_turns(steady, turn, does, own) for does, own in zip(todo, computes, strict=True)), strict=False)
    asks = tuple(
        [tuple([_asked(a, placement.stages[r][a.chunk], numbers) for a in own]) for r, own in enumerate(computes)]
    )
    return NumberedSchedule(tuple(todo), tuple(computes), asks, tuple(messages), tuple(turns), turn, channels)


def _asked(action: Compute, stage: int, numbers: Mapping[tuple[str, int, int], int]) -> int:
    """The message that a computation reads, if it comes from another stage."""
    kind, micro, _ = action
    what, came = ("value", -1) if kind == "Fwd" else ("gradient", 1)
    return NONE if kind == "Wgt" else numbers.get((what, micro, stage + came), NONE)


def _post(
    exchange: Exchange, rank: int, placement: Placement, numbers: dict[tuple[str, int, int], int],
    messages: list[NumberedMessage],
) -> Post:  # fmt: skip
    posted, sends = list[int](), set[int]()
    both = {t.peer for t in exchange.transfers if t.kind == "Send"}
    both &= {t.peer for t in exchange.transfers if t.kind == "Recv"}
    for t in exchange.transfers:
        if t.peer == rank:  # a copy: nothing goes over a wire, and nobody waits
            continue
        source, target = (rank, t.peer) if t.kind == "Send" else (t.peer, rank)
        stage = message_of(t, rank, placement).source
        number = numbers.setdefault((t.what, t.micro, stage), len(messages))
        if number == len(messages):
            messages.append(NumberedMessage(source, target, t.micro, (t.what, stage), t.peer in both))
        posted.append(number)
        if t.kind == "Send":
            sends.add(number)
    return Post(tuple(posted), frozenset(sends))


@cache
def begins_of(schedule: ScheduleName, pp: int, vpp: int, micros: int, rank: int) -> tuple[int, ...]:
    """The computations of a rank before which turns of micro-batches begin."""
    own, of = compute_lists(schedule, pp, vpp, micros)[rank], schedule_of(schedule)
    computes = [a for a in own if isinstance(a, Compute)]
    found = _turns(of.steady_after(pp, vpp), of.turn(pp, vpp), range(len(own)), computes)
    return tuple([place.compute for place in found])


def _turns(steady: int, turn: int, does: Sequence[int | Post], own: Sequence[Compute]) -> list[Position]:
    """Where each turn of micro-batches begins on a rank: after the computation before the first of its forwards."""
    found, before = list[Position](), 0
    for place, item in enumerate(does):
        if isinstance(item, int):
            kind, micro, chunk = own[item]
            if kind == "Fwd" and not chunk and micro >= steady and (micro - steady) % turn == 0:
                found.append(Position(before, item))
            before = place + 1
    return found

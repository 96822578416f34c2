"""A schedule for the clock: the computations of each pipeline rank, and its sends and receives, all numbered; and which
computations of a rank are the first and the last of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from penteract.errors import Bug
from penteract.parallel.bucket_plans import NONE
from penteract.readings.time.clock_program import PassKey
from penteract.schedule.actions import Compute, P2PBatch
from penteract.schedule.in_flight import action_lists, compute_lists
from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.schedule.schedule import Placement
from penteract.schedule.schedule_state import source_of


class Post(NamedTuple):
    """One rank's side of a p2p batch: messages in the order in which they are posted, each with whether it is sent; and
    those that are."""

    messages: tuple[tuple[int, bool], ...]
    sends: tuple[int, ...]


class NumberedMessage(NamedTuple):
    """A message, named by `micro` and `where` (value or gradient, the stage it comes from). `both`: an equal message
    goes the other way at the same time."""

    source: int
    target: int
    micro: int
    where: tuple[str, int]
    both: bool


class Position(NamedTuple):
    """A position in a rank's list: its next item, and its next computation."""

    item: int
    compute: int


class NumberedSchedule(NamedTuple):
    """A schedule with its messages numbered.

    todo      of each rank, in order: numbers of computations, and of posts, of which n is ~n (negative)
    posts     the posts of each rank
    computes  the computations of each rank; `reads`: the message that each reads, or `NONE`
    channels  the channel of each message: those of one channel (two ranks, one direction) arrive in order
    ways      how many channels there are
    links     (source, target, both) of messages that take equally long; `link`: of each message, its place there
    period_starts     where each period begins, on each rank; `period`: micro-batches in a period
    """

    todo: tuple[tuple[int, ...], ...]
    posts: tuple[tuple[Post, ...], ...]
    computes: tuple[tuple[Compute, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    messages: tuple[NumberedMessage, ...]
    period_starts: tuple[tuple[Position, ...], ...]
    period: int
    channels: tuple[int, ...]
    ways: int
    links: tuple[tuple[int, int, bool], ...]
    link: tuple[int, ...]


@cache
def numbered_schedule(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> NumberedSchedule:
    """Number the messages of a schedule. The two ends of a message share its number."""
    lists, of = action_lists(schedule, pp, vpp, num_micro_batches), schedule_of(schedule)
    placement, steady, period = of.placement(pp, vpp), of.steady_after(pp, vpp), of.period(pp, vpp)
    numbers: dict[tuple[str, int, int], int] = {}
    messages: list[NumberedMessage] = []
    todo, posts, computes = list[tuple[int, ...]](), list[tuple[Post, ...]](), list[tuple[Compute, ...]]()
    for rank, actions in enumerate(lists):
        own, posted, does = list[Compute](), list[Post](), list[int]()
        for action in actions:
            match action:
                case Compute():
                    does.append(len(own))
                    own.append(action)
                case P2PBatch():
                    if (post := _post(action, rank, placement, numbers, messages)).messages:
                        does.append(~len(posted))
                        posted.append(post)
                case _:
                    raise Bug("SCHEDULE", "overlapped passes cannot be simulated", found=str(action))
        todo.append(tuple(does))
        posts.append(tuple(posted))
        computes.append(tuple(own))
    ways = {way: i for i, way in enumerate(dict.fromkeys((m.where[0], m.source, m.target) for m in messages))}
    channels = tuple([ways[m.where[0], m.source, m.target] for m in messages])
    links = {link: i for i, link in enumerate(dict.fromkeys((m.source, m.target, m.both) for m in messages))}
    link = tuple([links[m.source, m.target, m.both] for m in messages])
    period_starts = zip(
        *(_periods(steady, period, does, own) for does, own in zip(todo, computes, strict=True)), strict=False
    )
    reads = tuple(
        [tuple([_read(a, placement.stages[r][a.chunk], numbers) for a in own]) for r, own in enumerate(computes)]
    )
    return NumberedSchedule(
        tuple(todo), tuple(posts), tuple(computes), reads, tuple(messages), tuple(period_starts), period, channels,
        len(ways), tuple(links), link,
    )  # fmt: skip


def _read(action: Compute, stage: int, numbers: Mapping[tuple[str, int, int], int]) -> int:
    """The message that a computation reads, or `NONE` if its input does not come from another stage."""
    kind, micro, _ = action
    what, came = ("value", -1) if kind == "Fwd" else ("gradient", 1)
    return NONE if kind == "Wgt" else numbers.get((what, micro, stage + came), NONE)


def _post(
    batch: P2PBatch, rank: int, placement: Placement, numbers: dict[tuple[str, int, int], int],
    messages: list[NumberedMessage],
) -> Post:  # fmt: skip
    posted: list[tuple[int, bool]] = []
    both = {t.peer for t in batch.transfers if t.kind == "Send"}
    both &= {t.peer for t in batch.transfers if t.kind == "Recv"}
    for t in batch.transfers:
        if t.peer == rank:  # a local copy: no message, and no wait
            continue
        source, target = (rank, t.peer) if t.kind == "Send" else (t.peer, rank)
        stage = source_of(t, rank, placement)
        number = numbers.setdefault((t.what, t.micro, stage), len(messages))
        if number == len(messages):
            messages.append(NumberedMessage(source, target, t.micro, (t.what, stage), t.peer in both))
        posted.append((number, t.kind == "Send"))
    return Post(tuple(posted), tuple([number for number, sends in posted if sends]))


@cache
def period_begins(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, rank: int) -> tuple[int, ...]:
    """The computations of a rank before which periods of its schedule begin."""
    own, of = compute_lists(schedule, pp, vpp, num_micro_batches)[rank], schedule_of(schedule)
    computes = [a for a in own if isinstance(a, Compute)]
    found = _periods(of.steady_after(pp, vpp), of.period(pp, vpp), range(len(own)), computes)
    return tuple([place.compute for place in found])


def _periods(steady: int, period: int, does: Sequence[int], own: Sequence[Compute]) -> list[Position]:
    """Where each period begins on a rank: right after the computation that precedes its first forward."""
    found, before = list[Position](), 0
    for place, item in enumerate(does):
        if item >= 0:
            kind, micro, chunk = own[item]
            if kind == "Fwd" and not chunk and micro >= steady and (micro - steady) % period == 0:
                found.append(Position(before, item))
            before = place + 1
    return found


class Spot(NamedTuple):
    """The kind of an action, and whether it is the first and the last of its kind."""

    walk: PassKey
    first: bool
    last: bool


class Order(NamedTuple):
    """The actions of a rank in order, as places in `spots`, which are distinct. The kinds of action in the order of
    their first ones, and of their last ones."""

    actions: tuple[int, ...]
    spots: tuple[Spot, ...]
    firsts: tuple[PassKey, ...]
    lasts: tuple[PassKey, ...]

    @staticmethod
    def of(actions: Sequence[Compute]) -> Order:
        """The order of these actions."""
        walks, first, last = [(a.kind, a.chunk) for a in actions], dict[PassKey, int](), dict[PassKey, int]()
        for i, walk in enumerate(walks):
            first.setdefault(walk, i)
            last[walk] = i
        places, own = dict[Spot, int](), [Spot(walk, first[walk] == i, last[walk] == i) for i, walk in enumerate(walks)]
        numbers = tuple([places.setdefault(spot, len(places)) for spot in own])
        return Order(numbers, tuple(places), tuple(first), tuple(sorted(last, key=last.__getitem__)))


@cache
def order_of(schedule: ScheduleName, pp: int, vpp: int, num_micro_batches: int, rank: int) -> Order:
    """The order of a rank's actions in a schedule."""
    return Order.of([a for a in compute_lists(schedule, pp, vpp, num_micro_batches)[rank] if isinstance(a, Compute)])

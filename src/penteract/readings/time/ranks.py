"""A step of all pipeline ranks: each plays its actions until it needs a message, which moves when both its ends have
posted it. Long schedules repeat a turn: once all ranks' relative states come again, the turns that are left are jumped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penteract.errors import Bug
from penteract.parallel.data import NONE
from penteract.readings.time.derive import Derived
from penteract.readings.time.line import NumberedMessage, NumberedSchedule, Position, Post
from penteract.readings.time.rank_clock import RankClock
from penteract.readings.time.stage import Stage
from penteract.step import names

_NOTHING = frozenset[int]()


class Unsettled(Exception):
    """No state came again in the turns that were played."""


class Mark(NamedTuple):
    """All ranks at the beginning of a turn, relative to the first one's clock.

    at      the first rank's clock
    states  what decides all that comes, but for hosts
    behind  how far each host is behind its device; `held`: how often it has held something up
    spent   how much each machine has noted
    left    turns that are still to be jumped
    """

    at: int
    states: tuple[Any, ...]
    behind: tuple[int, ...]
    held: tuple[int, ...]
    spent: tuple[int, ...]
    left: int


@dataclass(slots=True)
class Ranks:
    """Steps of one layout.

    stages, derived  of each pipeline rank
    wires            picoseconds of each message
    launch           picoseconds that the host needs to post a message, or to wait for one
    skipped          turns of the schedule that `line` leaves out
    jumps            whether what comes again is left out; else all is played
    log              of messages
    """

    line: NumberedSchedule
    stages: Sequence[Stage]
    derived: Sequence[Derived]
    wires: Sequence[int]
    launch: int
    skipped: int = 0
    jumps: bool = True
    log: Callable[[NumberedMessage, int, int], None] | None = None
    machines: list[RankClock] = field(init=False)
    ends: list[int] = field(default_factory=list[int])  # of steps
    met: list[int] = field(default_factory=list[int])  # when all ranks have come to a step's norm
    marks: list[list[Mark]] = field(default_factory=list[list[Mark]])  # of each step
    _at: list[int] = field(init=False)
    _sent: list[int] = field(init=False)  # of each message: when its sender has posted it
    _asked: list[int] = field(init=False)  # and its receiver
    _there: list[int] = field(init=False)  # when it has arrived
    _free: list[int] = field(init=False)  # of each channel
    _leaving: list[frozenset[int]] = field(init=False)  # of each rank: messages sent, and not waited for
    _asleep: dict[int, list[int]] = field(init=False)  # message -> ranks that wait for its other end
    _awake: list[int] = field(init=False)
    _unmet: dict[int, None] = field(init=False)  # messages that one end has posted
    slowest: int = 0  # the rank that ended the last step
    held_at_end: tuple[int, ...] = ()  # of the last step
    left: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])  # by each step to the next
    spent_at_end: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # of each step

    def __post_init__(self) -> None:
        """Give each rank an idle machine."""
        self.machines = [stage.clock.machine() for stage in self.stages]

    def step(self) -> None:
        """One step of all ranks, from what the last one left."""
        n, messages = len(self.machines), len(self.line.messages)
        self._at, self._leaving = [0] * n, [_NOTHING] * n
        self._sent, self._asked, self._there = ([NONE] * messages for _ in range(3))
        self._free, self._asleep, self._unmet = [0] * len(self.line.channels), {}, {}
        self.marks.append([])
        for m, stage, derived in zip(self.machines, self.stages, self.derived, strict=True):
            m.doing = NONE
            stage.clock.take(m, derived.opening)
        if self.jumps and self._turns():
            self._note_end(self.left[-1])
            return
        self._until([len(todo) for todo in self.line.todo])
        for r, (m, stage, derived) in enumerate(zip(self.machines, self.stages, self.derived, strict=True)):
            if self._leaving[r] and not self._settle(r):
                raise Bug("SCHEDULE", f"a message of rank {r} is never met")
            m.doing = NONE
            stage.clock.take(m, derived.closing)
        # What the world sums is there when its last rank has come: nobody updates before.
        last = max(m.now for m in self.machines)
        together = max(m.now + max(m.state.free) for m in self.machines) if len(self.machines) > 1 else 0
        self.met.append(max(last, together))
        for m, stage, derived in zip(self.machines, self.stages, self.derived, strict=True):
            if last > m.now or len(self.machines) > 1:
                stage.clock.wait_until(m, together, names.WAIT_RANKS)
            for segment, unit, needs in derived.update:
                stage.clock.advance(m, segment, unit, needs)
            m.host = max(m.host, m.now)  # it looks at the losses
        self.slowest = max(range(n), key=lambda r: self.machines[r].now)
        self.ends.append(end := self.machines[self.slowest].now)
        self._note_end(tuple([
            (end - m.now, m.host - m.now, m.state.number, m.state.fixed or m.unit,
             tuple(sorted((b, t - m.now) for b, t in m.pending.items())))
            for m in self.machines
        ]))  # fmt: skip

    @property
    def steady(self) -> bool:
        """Whether the last step has left what it was left: then all others take as long."""
        return len(self.left) > 1 and self.left[-1] == self.left[-2]

    @property
    def last(self) -> int:
        """Picoseconds of the last step."""
        return self.ends[-1] - self.ends[-2]

    def _note_end(self, left: tuple[Any, ...]) -> None:
        self.left.append(left)
        self.held_at_end = tuple([m.held for m in self.machines])
        self.spent_at_end.append(tuple([len(m.spent) for m in self.machines]))

    # ---- turns -----------------------------------------------------------------------------------------------

    def _turns(self) -> bool:
        """Play turn after turn, and jump once all ranks' states come again; whether the rest of the step is as that of
        the step before."""
        marks, seen, left = self.marks[-1], dict[tuple[Any, ...], int](), self.skipped
        for k, places in enumerate(self.line.turns):
            self._until([place.item for place in places])
            mark = self._mark(k, places, left)
            marks.append(mark)
            if len(self.marks) > 1 and self._goes_on_as_before(k):
                return True
            before = seen.get(mark.states)
            if left and before is not None and left % (k - before) == 0:
                quiet = [
                    a == b and not m.looked
                    for a, b, m in zip(mark.held, marks[before].held, self.machines, strict=True)
                ]
                if _as_late(mark, marks[before], quiet):
                    self._jump(marks[before], mark, left // (k - before))
                    left = 0
            seen[mark.states] = k
        if left:
            raise Unsettled
        return False

    def _mark(self, k: int, places: Sequence[Position], left: int) -> Mark:
        at, ms = self.machines[0].now, self.machines
        micro = k * self.line.turn
        own = [
            (
                m.now - at,
                m.state.number,
                0 if m.state.fixed else m.unit,
                len(m.pending),
                derived.left[place.compute],
                self._at[r] - place.item,
            )
            for r, (m, derived, place) in enumerate(zip(ms, self.derived, places, strict=True))
        ]
        under_way = [
            (message.where, message.micro - micro, *[t - at if t != NONE else None for t in times])
            for i in self._open([m.now for m in ms])
            for message, times in [(self.line.messages[i], (self._sent[i], self._asked[i], self._there[i]))]
        ]
        free = [max(0, t - at) for t in self._free]
        states = (*own, tuple(sorted(under_way, key=str)), tuple(free))
        return Mark(
            at, states, tuple([m.host - m.now for m in ms]), tuple([m.held for m in ms]),
            tuple([len(m.spent) for m in ms]), left,
        )  # fmt: skip

    def _jump(self, before: Mark, now: Mark, times: int) -> None:
        """Leave out `times` of what lies between two marks."""
        by, open_ = (now.at - before.at) * times, self._open([m.now for m in self.machines])
        for r, m in enumerate(self.machines):
            m.spent.extend([(parts, n * times) for parts, n in m.spent[before.spent[r] : now.spent[r]]])
            m.host += by + (now.behind[r] - before.behind[r]) * times
            m.now += by
        for i in open_:
            for times_of in (self._sent, self._asked, self._there):
                times_of[i] += by if times_of[i] != NONE else 0
        self._free = [t + by for t in self._free]

    def _goes_on_as_before(self, k: int) -> bool:
        """Whether a mark is that of the step before: then the rest of the step is that of the step before, too."""
        mark, old = self.marks[-1][k], self.marks[-2][k]
        quiet = [a == b and not m.looked for a, b, m in zip(old.held, self.held_at_end, self.machines, strict=True)]
        if (
            mark.states != old.states
            or mark.left != old.left
            or any(m.pending for m in self.machines)
            or not _as_late(mark, old, quiet)
        ):
            return False
        self.ends.append(mark.at + self.ends[-1] - old.at)
        for r, m in enumerate(self.machines):
            m.spent.extend(m.spent[old.spent[r] : self.spent_at_end[-1][r]])
        return True

    # ---- messages --------------------------------------------------------------------------------------------

    def _until(self, caps: Sequence[int]) -> None:
        """Play every rank up to its cap, or to where it waits for a peer that stands at its own."""
        awake, at, there = list(range(len(caps))), self._at, self._there
        self._awake = awake
        while awake:
            r = awake.pop()
            m, todo, cap, i = self.machines[r], self.line.todo[r], caps[r], at[r]
            actions, asks, clock = self.derived[r].actions, self.line.asks[r], self.stages[r].clock
            while i < cap:
                item = todo[i]
                if isinstance(item, int):
                    if (message := asks[item]) != NONE:
                        if there[message] == NONE:
                            self._asleep.setdefault(message, []).append(r)
                            break
                        if there[message] > m.now:
                            clock.expect(m, there[message])
                    m.doing = item
                    clock.take(m, actions[item])
                elif not self._exchange(r, m, item):
                    break
                i += 1
            at[r] = i

    def _exchange(self, r: int, m: RankClock, post: Post) -> bool:
        """Wait for what was sent, and post; False where a peer is not there yet."""
        if self._leaving[r] and not self._settle(r):
            return False
        m.host += self.launch * len(post.messages)
        now = m.now if m.now > m.host else m.host
        for i in post.messages:
            own, other = (self._sent, self._asked) if i in post.sends else (self._asked, self._sent)
            own[i] = now
            if other[i] == NONE:
                self._unmet[i] = None
            else:
                self._meet(i)
        self._leaving[r] = post.sends
        return True

    def _settle(self, r: int) -> bool:
        """Wait until what was sent has left."""
        if not self._arrive(r, self._leaving[r]):
            return False
        self._leaving[r] = _NOTHING
        return True

    def _meet(self, i: int) -> None:
        """Both ends of a message have posted it: it moves as soon as those before it have."""
        channel = self.line.channels[i]
        begin = max(self._sent[i], self._asked[i], self._free[channel])
        self._there[i] = self._free[channel] = begin + self.wires[i]
        if self.log is not None:
            self.log(self.line.messages[i], begin, self._there[i])
        del self._unmet[i]
        if (asleep := self._asleep.pop(i, None)) is not None:
            self._awake.extend(asleep)

    def _arrive(self, r: int, messages: Iterable[int]) -> bool:
        until = 0
        for i in messages:
            there = self._there[i]
            if there == NONE:
                self._asleep.setdefault(i, []).append(r)
                return False
            if there > until:
                until = there
        if until > (m := self.machines[r]).now:
            m.doing = NONE  # what was sent is of an action before
            self.stages[r].clock.wait_until(m, until, names.WAIT_SENT)
        return True

    def _open(self, now: Sequence[int]) -> list[int]:
        """Messages that have not moved, and those that are on their way at the ranks' clocks, or not waited for."""
        under_way = (i for i, there in enumerate(self._there) if there > now[self.line.messages[i].target])
        return sorted({*self._unmet, *under_way, *(i for some in self._leaving for i in some)})


def _as_late(now: Mark, then: Mark, quiet: Sequence[bool]) -> bool:
    """Whether hosts are as far behind as they were, or less where that held nothing up."""
    return all(h == b or (h < b and q) for h, b, q in zip(now.behind, then.behind, quiet, strict=True))

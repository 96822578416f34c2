"""A step of all pipeline ranks. Each simulates its actions until it needs a message; a message moves once both ends
have posted it. Long schedules are periodic (a period is `period` micro-batches): once the relative states of all
ranks repeat, the remaining periods are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penteract.errors import Bug
from penteract.parallel.bucket_plans import NONE
from penteract.readings.time.clock import LONG
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import Derived
from penteract.readings.time.numbered_schedule import NumberedMessage, NumberedSchedule, Position, Post
from penteract.readings.time.rank_clock import RankClock
from penteract.step import names


class Unsettled(Exception):
    """No state repeated in the periods that were simulated."""


class Mark(NamedTuple):
    """All ranks at the beginning of a period, relative to the first rank's clock.

    at      the first rank's clock
    states  all that decides what follows, except for hosts
    begun   how long ago each device ended the last step
    behind  how far each host is behind its device; `held`: how often it has delayed the device
    spent   the number of records of each rank clock
    left    periods that are still to be skipped
    """

    at: int
    states: tuple[Any, ...]
    begun: tuple[int, ...]
    behind: tuple[int, ...]
    held: tuple[int, ...]
    spent: tuple[int, ...]
    left: int


class Carried(NamedTuple):
    """What one rank carries over to the next step, in picoseconds from its own end.

    early      how long before the step's end it ends
    host       when its host begins to launch the next step; 0 where hosts are ahead
    streams    the state of its streams, by number, and `unit` unless that does not matter
    in_flight  (bucket, when its collective is done), by bucket
    """

    early: int
    host: int
    streams: int
    unit: bool | int
    in_flight: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Ranks:
    """Steps of one layout.

    In training on a GPU, the host reads the outcome of a step when it has launched the next one
    (`engine/session/session.py`). So it is at most one step ahead. A host that launches a step in less time than its
    device needs for it never delays the device.

    programs, derived  of each pipeline rank
    wires            picoseconds of each message
    launch           picoseconds that the host needs to post a message, or to wait for one
    skipped          periods of the schedule that `schedule` leaves out
    skip_repeats     whether repeated states are skipped; otherwise all is simulated
    at_once          whether the host reads the outcome of each step before it launches the next one
    hosts_ahead      no host delays its device: each step is simulated as if all had been launched long before
    log              receives each message
    """

    schedule: NumberedSchedule
    programs: Sequence[ClockProgram]
    derived: Sequence[Derived]
    wires: Sequence[int]
    launch: int
    skipped: int = 0
    skip_repeats: bool = True
    at_once: bool = False
    log: Callable[[NumberedMessage, int, int], None] | None = None
    rank_clocks: list[RankClock] = field(init=False)
    hosts_ahead: bool = field(init=False)
    ends: list[int] = field(default_factory=list[int])  # of steps
    met: list[int] = field(default_factory=list[int])  # when all ranks have reached the gradient norm of a step
    marks: list[list[Mark]] = field(default_factory=list[list[Mark]])  # of each step
    _at: list[int] = field(init=False)
    _send_posted: list[int] = field(init=False)  # of each message: when its sender has posted it
    _recv_posted: list[int] = field(init=False)  # when its receiver has posted it
    _arrived: list[int] = field(init=False)  # when it has arrived
    _free: list[int] = field(init=False)  # of each channel
    _leaving: list[tuple[int, ...]] = field(init=False)  # of each rank: messages posted to send and not yet waited for
    _moving: list[int] = field(init=False)  # messages that both ends have posted, and that may not have arrived
    _asleep: dict[int, list[int]] = field(init=False)  # message -> ranks that wait for its other end
    _awake: list[int] = field(init=False)
    _unmet: dict[int, None] = field(init=False)  # messages that one end has posted
    slowest: int = 0  # the rank that ended the last step
    carried: list[tuple[Carried, ...]] = field(default_factory=list[tuple[Carried, ...]])  # by each step to the next
    spent_at_end: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # of each step

    def __post_init__(self) -> None:
        """Give each rank an idle clock."""
        self.hosts_ahead = not self.at_once
        self.rank_clocks = [program.clock.rank_clock() for program in self.programs]

    def step(self) -> None:
        """Simulate one step of all ranks, from the state that the last one left."""
        n, messages = len(self.rank_clocks), len(self.schedule.messages)
        self._at, self._leaving, self._moving = [0] * n, [()] * n, list[int]()
        self._send_posted, self._recv_posted, self._arrived = ([NONE] * messages for _ in range(3))
        self._free, self._asleep, self._unmet = [0] * self.schedule.ways, {}, {}
        self.marks.append([])
        for m, program, derived in zip(self.rank_clocks, self.programs, self.derived, strict=True):
            m.doing = NONE
            m.host = m.now - LONG if self.hosts_ahead else m.host
            program.clock.take(m, derived.opening)
        if self.skip_repeats and self._play_periods():
            self._note_end(self.carried[-1])
            return
        self._until([len(todo) for todo in self.schedule.todo])
        for r, (m, program, derived) in enumerate(zip(self.rank_clocks, self.programs, self.derived, strict=True)):
            if self._leaving[r] and not self._settle(r):
                raise Bug("SCHEDULE", f"a message of rank {r} is never met")
            m.doing = NONE
            program.clock.take(m, derived.closing)
        # The gradient norm is summed over all ranks: none updates before the last has come.
        last = max(m.now for m in self.rank_clocks)
        together = max(m.now + max(m.state.free) for m in self.rank_clocks) if len(self.rank_clocks) > 1 else 0
        self.met.append(max(last, together))
        for m, program, derived in zip(self.rank_clocks, self.programs, self.derived, strict=True):
            if last > m.now or len(self.rank_clocks) > 1:
                program.clock.wait_until(m, together, names.WAIT_RANKS)
            for segment, unit, needs in derived.update:
                program.clock.advance(m, segment, unit, needs)
        if self.hosts_ahead and not self.ends:
            self._look_at_hosts()
        for m in self.rank_clocks:  # the host reads the outcome of this step, or of the one before
            m.host, m.ended = max(m.host, m.now if self.at_once else m.ended), m.now
        self.slowest = max(range(n), key=lambda r: self.rank_clocks[r].now)
        self.ends.append(end := self.rank_clocks[self.slowest].now)
        self._note_end(tuple([
            Carried(end - m.now, 0 if self.hosts_ahead else m.host - m.now, m.state.number, m.state.fixed or m.unit,
                    tuple(sorted((b, t - m.now) for b, t in m.pending.items())))
            for m in self.rank_clocks
        ]))  # fmt: skip

    def _look_at_hosts(self) -> None:
        """After the first step, see whether hosts may delay later ones: where a host needs longer to launch a step than
        the device for it, or waits for the device within it. No later step takes less than the first one on the rank
        that ended first: later ones begin with the update, and with communication in flight."""
        took = [m.host + LONG for m in self.rank_clocks]  # longer than any step, if the host has waited
        self.hosts_ahead = max(took) <= min(m.now for m in self.rank_clocks)
        if not self.hosts_ahead:
            for m, launched in zip(self.rank_clocks, took, strict=True):
                m.host = launched if m.host < 0 else m.host  # it began with its device

    @property
    def steady(self) -> bool:
        """Whether the last step ended in the state in which it began: then all later ones take as long. A host may be
        further ahead: if that changed nothing now, it changes nothing later, as what a step takes falls ever less with
        a host's lead."""
        if len(self.carried) < 2:
            return False
        return all(_ends_as_it_began(was, now) for was, now in zip(self.carried[-2], self.carried[-1], strict=True))

    @property
    def last(self) -> int:
        """Picoseconds of the last step."""
        return self.ends[-1] - self.ends[-2]

    def _note_end(self, carried: tuple[Carried, ...]) -> None:
        self.carried.append(carried)
        self.spent_at_end.append(tuple([len(m.spent) for m in self.rank_clocks]))

    # ---- periods ---------------------------------------------------------------------------------------------

    def _play_periods(self) -> bool:
        """Simulate period after period, and skip the others once the states of all ranks repeat. Returns whether the
        rest of the step equals that of the step before; it is copied then."""
        marks, seen, left = self.marks[-1], dict[tuple[Any, ...], int](), self.skipped
        for k, places in enumerate(self.schedule.period_starts):
            self._until([place.item for place in places])
            mark = self._mark(k, places, left)
            marks.append(mark)
            if len(self.marks) > 1 and self._goes_on_as_before(k):
                return True
            before = seen.get(mark.states)
            if left and before is not None and left % (k - before) == 0:
                quiet = [a == b for a, b in zip(mark.held, marks[before].held, strict=True)]
                if _as_late(mark, marks[before], quiet):
                    self._jump(marks[before], mark, left // (k - before))
                    left = 0
            seen[mark.states] = k
        if left:
            raise Unsettled
        return False

    def _mark(self, k: int, places: Sequence[Position], left: int) -> Mark:
        at, ms = self.rank_clocks[0].now, self.rank_clocks
        micro = k * self.schedule.period
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
            for message, times in [
                (self.schedule.messages[i], (self._send_posted[i], self._recv_posted[i], self._arrived[i]))
            ]
        ]
        free = [max(0, t - at) for t in self._free]
        states = (*own, tuple(sorted(under_way, key=str)), tuple(free))
        return Mark(
            at, states, tuple([m.now - m.ended for m in ms]), tuple([m.host - m.now for m in ms]),
            tuple([m.held for m in ms]), tuple([len(m.spent) for m in ms]), left,
        )  # fmt: skip

    def _jump(self, before: Mark, now: Mark, times: int) -> None:
        """Skip what lies between two marks, `times` times."""
        by, open_ = (now.at - before.at) * times, self._open([m.now for m in self.rank_clocks])
        for r, m in enumerate(self.rank_clocks):
            m.spent.extend([(parts, n * times) for parts, n in m.spent[before.spent[r] : now.spent[r]]])
            m.host += by + (now.behind[r] - before.behind[r]) * times
            m.now += by
        for i in open_:
            for times_of in (self._send_posted, self._recv_posted, self._arrived):
                times_of[i] += by if times_of[i] != NONE else 0
        self._free = [t + by for t in self._free]

    def _goes_on_as_before(self, k: int) -> bool:
        """Whether a mark equals that of the step before. Then so does the rest of the step, and it is copied."""
        mark, old = self.marks[-1][k], self.marks[-2][k]
        if (
            mark.states != old.states
            or mark.left != old.left
            or any(m.pending for m in self.rank_clocks)
            # A host that is less late now begins the next step earlier: that is another step.
            or not (self.hosts_ahead or (mark.begun, mark.behind) == (old.begun, old.behind))
        ):
            return False
        self.ends.append(mark.at + self.ends[-1] - old.at)
        for r, m in enumerate(self.rank_clocks):
            m.spent.extend(m.spent[old.spent[r] : self.spent_at_end[-1][r]])
        return True

    # ---- messages --------------------------------------------------------------------------------------------

    def _until(self, caps: Sequence[int]) -> None:
        """Simulate every rank up to its cap, or until it waits for a peer that is at its own cap."""
        schedule, awake, at, there = self.schedule, list(range(len(caps))), self._at, self._arrived
        self._awake = awake
        while awake:
            r = awake.pop()
            m, todo, posts, cap, i = self.rank_clocks[r], schedule.todo[r], schedule.posts[r], caps[r], at[r]
            actions, reads, clock = self.derived[r].actions, schedule.reads[r], self.programs[r].clock
            while i < cap:
                item = todo[i]
                if item < 0:
                    if not self._post_p2p(r, m, posts[~item]):
                        break
                else:
                    if (message := reads[item]) != NONE:
                        if (arrives := there[message]) == NONE:
                            self._asleep.setdefault(message, []).append(r)
                            break
                        if arrives > m.now:
                            clock.expect(m, arrives)
                    m.doing = item
                    clock.take(m, actions[item])
                i += 1
            at[r] = i

    def _post_p2p(self, r: int, m: RankClock, post: Post) -> bool:
        """Wait for earlier sends, and post a P2P batch; False if a peer has not posted its side yet."""
        if self._leaving[r] and not self._settle(r):
            return False
        m.host += self.launch * len(post.messages)
        now = m.now if m.now > m.host else m.host
        send_posted, recv_posted = self._send_posted, self._recv_posted
        for i, sends in post.messages:
            if sends:
                send_posted[i], other = now, recv_posted[i]
            else:
                recv_posted[i], other = now, send_posted[i]
            if other == NONE:
                self._unmet[i] = None
            else:
                self._meet(i, now if now > other else other)
        self._leaving[r] = post.sends
        return True

    def _settle(self, r: int) -> bool:
        """Wait until all sends of this rank are complete; False if one is not."""
        until, arrived = 0, self._arrived
        for i in self._leaving[r]:
            if (there := arrived[i]) == NONE:
                self._asleep.setdefault(i, []).append(r)
                return False
            if there > until:
                until = there
        if until > (m := self.rank_clocks[r]).now:
            m.doing = NONE  # the sends belong to an earlier action
            self.programs[r].clock.wait_until(m, until, names.WAIT_SENT)
        self._leaving[r] = ()
        return True

    def _meet(self, i: int, posted: int) -> None:
        """Both ends have posted a message: it moves after those before it in its channel. `posted`: the later post."""
        free, channel = self._free, self.schedule.channels[i]
        begin = posted if posted > free[channel] else free[channel]
        self._arrived[i] = free[channel] = begin + self.wires[i]
        self._moving.append(i)
        if self.log is not None:
            self.log(self.schedule.messages[i], begin, self._arrived[i])
        del self._unmet[i]
        if (asleep := self._asleep.pop(i, None)) is not None:
            self._awake.extend(asleep)

    def _open(self, now: Sequence[int]) -> list[int]:
        """Messages that one end has posted, that are in flight at the ranks' clocks, or that are not waited for."""
        there, messages = self._arrived, self.schedule.messages
        self._moving = [i for i in self._moving if there[i] > now[messages[i].target]]  # clocks only move on
        return sorted({*self._unmet, *self._moving, *(i for some in self._leaving for i in some)})


def _as_late(now: Mark, then: Mark, quiet: Sequence[bool]) -> bool:
    """Whether each host is as far behind as before; or less far, if it has delayed nothing; or far ahead."""
    return all(
        h == b or (h < b and q) or h < -LONG // 2 for h, b, q in zip(now.behind, then.behind, quiet, strict=True)
    )


def _ends_as_it_began(was: Carried, now: Carried) -> bool:
    ahead = now.host < was.host < 0
    return now == (was._replace(host=now.host) if ahead else was)

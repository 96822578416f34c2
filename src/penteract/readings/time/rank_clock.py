"""Machines: what a rank's clocks are between segments, and who advances them: remembering what a segment makes of a
state, and jumping over runs once their state comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penteract.parallel.data import NONE
from penteract.readings.ideal import PARTS
from penteract.readings.time.clock import COMPUTE, FAR, LONG, RELATIVE, Flights, Key, Op, Parts, play

Step = tuple[int, int, tuple[int, ...]]  # a segment, its unit, the buckets whose gather after the update it waits for
Run = tuple[tuple[Step, ...], int, int]  # a declaration, how often, and how many units on each time
Runs = tuple[Run, ...]
MESSAGE: Key = ("m", 0, 0)  # from another stage


def seen_from(key: Key, unit: int) -> Key:
    """A key's name where `unit` is 0."""
    return (key[0], key[1] - unit, key[2]) if key[0] in RELATIVE else key


@dataclass(slots=True)
class StreamState:
    """A machine's streams and flights relative to its `now`, named from a unit: interned, so equal ones are one."""

    free: tuple[int, ...]
    flights: Flights
    number: int
    fixed: bool  # nothing in it is named from a unit
    shifted: dict[int, StreamState] = field(default_factory=dict[int, "StreamState"])


# What a segment or an action makes of a state: (picoseconds, state, those of the host, latest host, its floor, parts)
Answer = tuple[int, StreamState, int, int, int, Parts]
Whole = tuple[int, StreamState, int, int, int, tuple[Parts, int], int]  # of an action; and the unit that it ends with
Trace = tuple[int, Answer | None, int]  # when it began, what it gave; or picoseconds of the host for turns left out


@dataclass(slots=True)
class RankClock:
    """One rank's clocks. `host` and `pending` are absolute.

    unit     that names in `state` are counted from
    pending  when parameters that were gathered after the last update are there, by bucket
    held     how often the host held something up; `looked`: whether it waits for the device within a step
    doing    the number of the computation that it is in, or `NONE`
    spent    what was played, and how often
    """

    state: StreamState
    now: int = 0
    host: int = 0
    unit: int = 0
    pending: dict[int, int] = field(default_factory=dict[int, int])
    held: int = 0
    looked: bool = False
    doing: int = NONE  # the number of the computation, if any
    spent: list[tuple[Parts, int]] = field(default_factory=list[tuple[Parts, int]])

    def parts(self, since: int = 0) -> list[int]:
        """Picoseconds of each part of what was played, after the first `since` of `spent`."""
        total = [0] * len(PARTS)
        for parts, times in self.spent[since:]:
            for i, n in enumerate(parts):
                total[i] += n * times
        return total


Log = Callable[[RankClock, int, str, int, int], None]  # who, the stream, what, from when to when


@dataclass(slots=True)
class Clock:
    """Advances machines by segments, remembers, and jumps over runs once their state comes again.

    A host that runs ahead never returns to a state, and need not: what was played holds for every host that is no later
    than `latest`. So states leave the host out, and a jump needs that it holds nothing up and falls no further behind.

    launch picoseconds of the host for an op by its name
    owner  of each stream, the part of a step that waiting for it is
    log    of every op that is played, by whom; for clocks that remember nothing
    """

    launch: Callable[[str], int]
    slower: int
    owner: tuple[int, ...]
    jumps: bool = True
    remembers: bool = True
    log: Log | None = None
    ops: list[tuple[Op, ...]] = field(default_factory=list[tuple[Op, ...]])
    launches: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # of each of them
    segments: dict[tuple[Op, ...], int] = field(default_factory=dict[tuple[Op, ...], int])
    runs: list[Runs] = field(default_factory=list[Runs])
    actions: dict[Runs, int] = field(default_factory=dict[Runs, int])
    states: dict[tuple[tuple[int, ...], Flights], StreamState] = field(
        default_factory=dict[tuple[tuple[int, ...], Flights], StreamState]
    )
    known: dict[tuple[int, int], Answer] = field(default_factory=dict[tuple[int, int], Answer])
    late: dict[tuple[int, int, int], Answer] = field(default_factory=dict[tuple[int, int, int], Answer])
    whole: dict[tuple[int, int, int], Whole] = field(default_factory=dict[tuple[int, int, int], "Whole"])
    played: int = 0
    idle: StreamState = field(init=False)  # nothing under way

    def __post_init__(self) -> None:
        """Make the idle state."""
        self.idle = self.state((0,) * len(self.owner), ())

    # ---- what is played --------------------------------------------------------------------------------------

    def segment(self, ops: tuple[Op, ...]) -> int:
        """A number for these ops, the same for the same."""
        if (known := self.segments.get(ops)) is not None:
            return known
        self.segments[ops] = len(self.ops)
        self.ops.append(ops)
        self.launches.append(tuple([self.launch(op[-1]) for op in ops]))
        return len(self.ops) - 1

    def action(self, runs: Runs) -> int:
        """A number for these runs, the same for the same."""
        if (known := self.actions.get(runs)) is not None:
            return known
        self.actions[runs] = len(self.runs)
        self.runs.append(runs)
        return len(self.runs) - 1

    def machine(self) -> RankClock:
        """One with nothing under way."""
        return RankClock(self.idle)

    def state(self, free: tuple[int, ...], flights: Flights) -> StreamState:
        """One object for equal states. `free`: picoseconds until each stream is free; `flights`: until each is done."""
        key = (free, flights)
        if (known := self.states.get(key)) is not None:
            return known
        fixed = not any(name[0] in RELATIVE for name, _ in flights)
        made = self.states[key] = StreamState(free, flights, len(self.states), fixed)
        return made

    def _seen_from(self, state: StreamState, by: int) -> StreamState:
        """The same, named from `by` units on."""
        if state.fixed or not by:
            return state
        if (known := state.shifted.get(by)) is None:
            flights = tuple(sorted([(seen_from(key, by), t) for key, t in state.flights]))
            known = state.shifted[by] = self.state(state.free, flights)
        return known

    # ---- playing ---------------------------------------------------------------------------------------------

    def wait_until(self, m: RankClock, moment: int, name: str) -> None:
        """Compute stands still until then, in no segment."""
        if (dt := moment - m.now) > 0:
            if self.log is not None:
                self.log(m, COMPUTE, name, m.now, moment)
            if m.state is not self.idle:
                free = tuple([f - dt if f > dt else 0 for f in m.state.free])
                m.state = self.state(free, tuple([(k, t - dt) for k, t in m.state.flights if t > dt]))
            m.now = moment

    def expect(self, m: RankClock, moment: int) -> None:
        """A message is there at a moment to come: the next action waits for it where it reads it."""
        m.state = self.state(m.state.free, tuple(sorted((*m.state.flights, (MESSAGE, moment - m.now)))))

    def take(self, m: RankClock, action: int) -> None:
        """Play an action, or take what is remembered of it."""
        state = m.state
        key = (action, state.number, 0 if state.fixed else m.unit)
        found = self.whole.get(key)
        if found is not None and m.host - m.now <= found[3]:
            done, m.state, calls, _, floor, spent, m.unit = found
            host, least = m.host + calls, m.now + floor
            m.host = host if host > least else least
            m.now += done
            m.spent.append(spent)
            return
        runs = self.runs[action]
        plain = self.jumps and self.remembers and not any(step[2] for declaration, _, _ in runs for step in declaration)
        at, held, first = m.now, m.held, len(m.spent)
        trail: list[Trace] = []
        for declaration, times, step in runs:
            self._run(m, declaration, times, step, trail)
        if plain and m.held == held:
            done, state, calls, latest, least, parts = _joined(trail, m, at, m.spent[first:])
            self.whole[key] = done, state, calls, latest, least, (parts, 1), m.unit

    def _run(self, m: RankClock, declaration: tuple[Step, ...], times: int, step: int, trail: list[Trace]) -> None:
        turn, first = 0, declaration[0][1]
        while turn < times:
            before, at, host, held = self._seen_from(m.state, first + turn * step - m.unit), m.now, m.host, m.held
            begun = len(trail)
            for segment, unit, needs in declaration:
                self.advance(m, segment, unit + turn * step, needs, trail)
            turn += 1
            if not self.jumps or turn == times or declaration[0][2]:
                continue
            if self._seen_from(m.state, first + turn * step - m.unit) is before and (
                m.host - m.now == host - at
                or (m.held == held and m.host - m.now < host - at and not _looks(trail, begun))
            ):
                self._jump(m, trail, begun, (m.now - at, m.host - host, times - turn))
                m.unit += step * (times - turn)
                return

    def _jump(self, m: RankClock, trail: list[Trace], begun: int, turn: tuple[int, int, int]) -> None:
        """Leave out what repeats. `turn`: picoseconds of one, those of the host, and how many are left."""
        each, calls, left = turn
        last = [(at + each * left, answer, 0) for at, answer, _ in trail[begun:]]
        trail.append((0, None, (left - 1) * sum(answer[2] for _, answer, _ in last if answer)))
        for item in last:
            if item[1]:
                m.spent.append((item[1][5], left))
        trail.extend(last)
        m.now, m.host = m.now + each * left, m.host + calls * left

    def advance(
        self, m: RankClock, segment: int, unit: int = 0, needs: tuple[int, ...] = (),
        trail: list[Trace] | None = None,
    ) -> None:  # fmt: skip
        """A segment of a unit, from where the machine is."""
        state = m.state if unit == m.unit else self._seen_from(m.state, unit - m.unit)
        if needs:
            late = [(("p", 0, i), t) for i, b in enumerate(needs) if (t := m.pending.pop(b, 0) - m.now) > 0]
            state = self.state(state.free, tuple(sorted((*state.flights, *late)))) if late else state
        behind = m.host - m.now
        key = (segment, state.number)
        answer = self.known.get(key)
        if answer is None:
            answer = self.known[key] = self._play(m, segment, state, -LONG)
        if not self.remembers:
            m.unit = unit
            answer = self._play(m, segment, state, behind, logged=True)
        elif behind > answer[3]:
            m.held += 1
            late_key = (segment, state.number, behind)
            answer = self.late.get(late_key)
            if answer is None:
                answer = self.late[late_key] = self._play(m, segment, state, behind)
        if trail is not None:
            trail.append((m.now, answer, 0))
        done, m.state, calls, _, floor, parts = answer
        m.host = max(m.host + calls, m.now + floor)
        m.now += done
        m.unit = unit
        m.spent.append((parts, 1))
        if m.state.flights and m.state.flights[-1][0][0] == "u":  # sorted: gathers after an update come last
            self._set_aside(m)

    def _set_aside(self, m: RankClock) -> None:
        """What is gathered after the update is waited for in the next step, by bucket."""
        kept = [(key, t) for key, t in m.state.flights if key[0] != "u"]
        m.pending |= {m.unit + key[1]: m.now + t for key, t in m.state.flights if key[0] == "u"}
        m.state = self.state(m.state.free, tuple(kept))

    def _play(self, m: RankClock, segment: int, state: StreamState, behind: int, *, logged: bool = False) -> Answer:
        self.played += 1
        free, at, tell = list(state.free), m.now, self.log if logged else None
        ops, launches = self.ops[segment], self.launches[segment]

        def log(stream: int, name: str, start: int, end: int) -> None:
            if tell is not None:
                tell(m, stream, name, at + start, at + end)

        told = play(ops, free, dict(state.flights), behind, launches, self.slower, self.owner, tell and log)
        done = told.done
        after = sorted([(key, t - done) for key, t in told.flights.items() if t > done])
        left = self.state(tuple([f - done if f > done else 0 for f in free]), tuple(after))
        if behind == -LONG:
            return done, left, sum(launches), told.latest - LONG, told.floor, tuple(told.parts)
        return done, left, told.host - behind, FAR, -FAR, tuple(told.parts)


def _looks(trail: list[Trace], begun: int) -> bool:
    """Whether the host waited for the device."""
    return any(answer and answer[4] > -LONG for _, answer, _ in trail[begun:])


def _joined(trail: Sequence[Trace], m: RankClock, at: int, spent: Sequence[tuple[Parts, int]]) -> Answer:
    """One answer for all that was played since `at`."""
    calls, latest, floor = 0, FAR, -FAR
    for begun, answer, left_out in trail:
        if answer is None:
            calls, floor = calls + left_out, floor + left_out
            continue
        latest = min(latest, answer[3] + begun - at - calls)
        calls, floor = calls + answer[2], max(floor + answer[2], answer[4] + begun - at)
    total = [0] * len(PARTS)
    for parts, times in spent:
        for i, n in enumerate(parts):
            total[i] += n * times
    return m.now - at, m.state, calls, latest, floor, tuple(total)

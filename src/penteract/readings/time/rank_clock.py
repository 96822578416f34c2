"""The state of a rank's clocks between segments, and the `Clock` that advances it. It caches what a segment makes of a
state, and skips the rest of a loop over equal segments once their state repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penteract.parallel.bucket_plans import NONE
from penteract.readings.ideal import PARTS
from penteract.readings.time.clock import COMPUTE, FAR, LONG, RELATIVE, InFlight, Key, Op, Parts, simulate

# A segment, its FSDP unit, and the buckets whose gather after the update it waits for.
PlacedSegment = tuple[int, int, tuple[int, ...]]
Loop = tuple[tuple[PlacedSegment, ...], int, int]  # segments, how often they repeat, units from one repeat to the next
Loops = tuple[Loop, ...]
MESSAGE: Key = ("m", 0, 0)  # from another pipeline rank


def seen_from(key: Key, unit: int) -> Key:
    """A key with its unit counted from `unit`."""
    return (key[0], key[1] - unit, key[2]) if key[0] in RELATIVE else key


@dataclass(slots=True)
class StreamState:
    """A rank's streams and its ops in flight, relative to `now`, with units counted from one unit. Equal states are one
    object."""

    free: tuple[int, ...]
    in_flight: InFlight
    number: int
    fixed: bool  # no key in it depends on a unit
    shifted: dict[int, StreamState] = field(default_factory=lambda: {})
    awaiting: dict[int, StreamState] = field(default_factory=lambda: {})  # a message, by when it arrives


# What a segment or an action makes of a state: (picoseconds, state, picoseconds of the host, latest host for which this
# holds, earliest end of the host, parts)
Answer = tuple[int, StreamState, int, int, int, Parts]
Whole = tuple[int, StreamState, int, int, int, tuple[Parts, int], int]  # the same of an action, and its last unit
Trace = tuple[int, Answer | None, int]  # when it began, its result; or the host's picoseconds of skipped repeats


@dataclass(slots=True)
class RankClock:
    """One rank's clocks: `now` of the device, and the host's. `now`, `host`, `ended` and `pending` are absolute.

    ended    when the device ended the last step
    unit     the unit from which keys in `state` are counted
    pending  when parameters gathered after the last update arrive, by bucket
    held     how often the host delayed the device
    doing    the number of the current computation, or `NONE`
    spent    the parts of what was simulated, and how often
    """

    state: StreamState
    now: int = 0
    host: int = 0
    ended: int = 0
    unit: int = 0
    pending: dict[int, int] = field(default_factory=dict[int, int])
    held: int = 0
    doing: int = NONE
    spent: list[tuple[Parts, int]] = field(default_factory=list[tuple[Parts, int]])

    def parts(self, since: int = 0) -> list[int]:
        """Picoseconds of each part, without the first `since` records of `spent`."""
        return _total(self.spent[since:])


Log = Callable[[RankClock, int, str, int, int], None]  # rank, stream, name, start, end


@dataclass(slots=True)
class Clock:
    """Advances rank clocks by segments, caches the results, and skips the rest of a loop once its state repeats.

    A host that runs ahead never repeats a state, and need not: a result holds for every host that is no later than
    `latest`. So states leave the host out. A skip requires that the host delays nothing and falls no further behind.

    launch    picoseconds of the host for an op, by its name
    slower    millionths by which compute is slower while a collective runs
    owner     the part of a step to which waits for a stream belong, of each stream
    remembers whether results are cached
    log       receives every simulated op and its rank; only for clocks that cache nothing
    """

    launch: Callable[[str], int]
    slower: int
    owner: tuple[int, ...]
    skip_repeats: bool = True
    remembers: bool = True
    log: Log | None = None
    ops: list[tuple[Op, ...]] = field(default_factory=list[tuple[Op, ...]])
    launches: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # of each of them
    segments: dict[tuple[Op, ...], int] = field(default_factory=dict[tuple[Op, ...], int])
    loops: list[Loops] = field(default_factory=list[Loops])
    actions: dict[Loops, int] = field(default_factory=dict[Loops, int])
    states: dict[tuple[tuple[int, ...], InFlight], StreamState] = field(
        default_factory=dict[tuple[tuple[int, ...], InFlight], StreamState]
    )
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict[tuple[int, int], Answer])
    late: dict[tuple[int, int, int], Answer] = field(
        default_factory=dict[tuple[int, int, int], Answer]
    )  # of late hosts
    whole: dict[tuple[int, int, int], Whole] = field(default_factory=dict[tuple[int, int, int], "Whole"])
    simulated: int = 0
    idle: StreamState = field(init=False)  # nothing in flight

    def __post_init__(self) -> None:
        """Make the idle state."""
        self.idle = self.state((0,) * len(self.owner), ())

    # ---- segments, actions and states ------------------------------------------------------------------------

    def segment(self, ops: tuple[Op, ...]) -> int:
        """The number of these ops: equal ops have one number."""
        if (found := self.segments.get(ops)) is not None:
            return found
        self.segments[ops] = len(self.ops)
        self.ops.append(ops)
        self.launches.append(tuple([self.launch(op[-1]) for op in ops]))
        return len(self.ops) - 1

    def action(self, loops: Loops) -> int:
        """The number of an action of these loops: equal ones have one number."""
        if (found := self.actions.get(loops)) is not None:
            return found
        self.actions[loops] = len(self.loops)
        self.loops.append(loops)
        return len(self.loops) - 1

    def rank_clock(self) -> RankClock:
        """An idle rank clock."""
        return RankClock(self.idle)

    def state(self, free: tuple[int, ...], in_flight: InFlight) -> StreamState:
        """The state of these streams; equal states are one object. `free`: picoseconds until each stream is free;
        `in_flight`: until each op in flight is done."""
        key = (free, in_flight)
        if (found := self.states.get(key)) is not None:
            return found
        fixed = not any(name[0] in RELATIVE for name, _ in in_flight)
        made = self.states[key] = StreamState(free, in_flight, len(self.states), fixed)
        return made

    def _seen_from(self, state: StreamState, by: int) -> StreamState:
        """The same state, with units counted from `by` units later."""
        if state.fixed or not by:
            return state
        if (found := state.shifted.get(by)) is None:
            in_flight = tuple(sorted([(seen_from(key, by), t) for key, t in state.in_flight]))
            found = state.shifted[by] = self.state(state.free, in_flight)
        return found

    # ---- simulation ------------------------------------------------------------------------------------------

    def wait_until(self, m: RankClock, moment: int, name: str) -> None:
        """Compute waits until `moment`, outside of any segment."""
        if (dt := moment - m.now) > 0:
            if self.log is not None:
                self.log(m, COMPUTE, name, m.now, moment)
            if m.state is not self.idle:
                free = tuple([f - dt if f > dt else 0 for f in m.state.free])
                m.state = self.state(free, tuple([(k, t - dt) for k, t in m.state.in_flight if t > dt]))
            m.now = moment

    def expect(self, m: RankClock, moment: int) -> None:
        """A message arrives at a future `moment`: the next action waits for it where it reads it."""
        state, arrives = m.state, moment - m.now
        if (found := state.awaiting.get(arrives)) is None:
            in_flight = tuple(sorted((*state.in_flight, (MESSAGE, arrives))))
            found = state.awaiting[arrives] = self.state(state.free, in_flight)
        m.state = found

    def take(self, m: RankClock, action: int) -> None:
        """Simulate an action, or apply its cached result."""
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
        loops = self.loops[action]
        plain = (
            self.skip_repeats
            and self.remembers
            and not any(needs for segments, _, _ in loops for _, _, needs in segments)
        )
        at, held, first = m.now, m.held, len(m.spent)
        trail: list[Trace] = []
        for segments, times, stride in loops:
            self._loop(m, segments, times, stride, trail)
        if plain and m.held == held:
            done, state, calls, latest, least, parts = _joined(trail, m, at, m.spent[first:])
            self.whole[key] = done, state, calls, latest, least, (parts, 1), m.unit

    def _loop(
        self, m: RankClock, segments: tuple[PlacedSegment, ...], times: int, stride: int, trail: list[Trace]
    ) -> None:
        turn, first = 0, segments[0][1]
        while turn < times:
            before, at, host, held = self._seen_from(m.state, first + turn * stride - m.unit), m.now, m.host, m.held
            begun = len(trail)
            for segment, unit, needs in segments:
                self.advance(m, segment, unit + turn * stride, needs, trail)
            turn += 1
            if not self.skip_repeats or turn == times or segments[0][2]:
                continue
            if self._seen_from(m.state, first + turn * stride - m.unit) is before and (
                m.host - m.now == host - at
                or m.host - m.now < -LONG // 2  # far ahead
                or (m.held == held and m.host - m.now < host - at and not _looks(trail, begun))
            ):
                self._jump(m, trail, begun, (m.now - at, m.host - host, times - turn))
                m.unit += stride * (times - turn)
                return

    def _jump(self, m: RankClock, trail: list[Trace], begun: int, turn: tuple[int, int, int]) -> None:
        """Skip the remaining repeats. `turn`: picoseconds of one repeat, those of the host, and how many remain."""
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
        """Advance by a segment of a unit."""
        state = m.state if unit == m.unit else self._seen_from(m.state, unit - m.unit)
        if needs:
            late = [(("p", 0, i), t) for i, b in enumerate(needs) if (t := m.pending.pop(b, 0) - m.now) > 0]
            state = self.state(state.free, tuple(sorted((*state.in_flight, *late)))) if late else state
        behind = m.host - m.now
        key = (segment, state.number)
        answer = self.answers.get(key)
        if answer is None:
            answer = self.answers[key] = self._simulate(m, segment, state, -LONG)
        if not self.remembers:
            m.unit = unit
            answer = self._simulate(m, segment, state, behind, logged=True)
        elif behind > answer[3]:
            m.held += 1
            late_key = (segment, state.number, behind)
            answer = self.late.get(late_key)
            if answer is None:
                answer = self.late[late_key] = self._simulate(m, segment, state, behind)
        if trail is not None:
            trail.append((m.now, answer, 0))
        done, m.state, calls, _, floor, parts = answer
        m.host = max(m.host + calls, m.now + floor)
        m.now += done
        m.unit = unit
        m.spent.append((parts, 1))
        if m.state.in_flight and m.state.in_flight[-1][0][0] == "u":  # sorted: gathers after an update come last
            self._set_aside(m)

    def _set_aside(self, m: RankClock) -> None:
        """Keep gathers after the update, by bucket: the next step waits for them."""
        kept = [(key, t) for key, t in m.state.in_flight if key[0] != "u"]
        m.pending |= {m.unit + key[1]: m.now + t for key, t in m.state.in_flight if key[0] == "u"}
        m.state = self.state(m.state.free, tuple(kept))

    def _simulate(self, m: RankClock, segment: int, state: StreamState, behind: int, *, logged: bool = False) -> Answer:
        self.simulated += 1
        free, at, sink = list(state.free), m.now, self.log if logged else None
        ops, launches = self.ops[segment], self.launches[segment]

        def log(stream: int, name: str, start: int, end: int) -> None:
            if sink is not None:
                sink(m, stream, name, at + start, at + end)

        result = simulate(ops, free, dict(state.in_flight), behind, launches, self.slower, self.owner, sink and log)
        done = result.done
        after = sorted([(key, t - done) for key, t in result.in_flight.items() if t > done])
        left = self.state(tuple([f - done if f > done else 0 for f in free]), tuple(after))
        if behind == -LONG:
            return done, left, sum(launches), result.latest - LONG, result.floor, tuple(result.parts)
        return done, left, result.host - behind, FAR, -FAR, tuple(result.parts)


def _looks(trail: list[Trace], begun: int) -> bool:
    """Whether the host waited for the device."""
    return any(answer and answer[4] > -LONG for _, answer, _ in trail[begun:])


def _joined(trail: Sequence[Trace], m: RankClock, at: int, spent: Sequence[tuple[Parts, int]]) -> Answer:
    """One result for all that was simulated since `at`."""
    calls, latest, floor = 0, FAR, -FAR
    for begun, answer, left_out in trail:
        if answer is None:
            calls, floor = calls + left_out, floor + left_out
            continue
        begun -= at
        if (limit := answer[3] + begun - calls) < latest:
            latest = limit
        calls, floor = calls + answer[2], floor + answer[2]
        if (waited := answer[4] + begun) > floor:
            floor = waited
    return m.now - at, m.state, calls, latest, floor, tuple(_total(spent))


def _total(spent: Sequence[tuple[Parts, int]]) -> list[int]:
    """Picoseconds of each part. Most records are of few different segments."""
    times_of: dict[Parts, int] = {}
    for parts, times in spent:
        times_of[parts] = times_of.get(parts, 0) + times
    total = [0] * len(PARTS)
    for parts, times in times_of.items():
        for i, n in enumerate(parts):
            if n:
                total[i] += n * times
    return total

"""The clock plays what a run does: the same calls, wires and waits in the same order; and jumps change nothing.

What a run does is seen from outside (`observed_calls.py`), and what it puts on wires is priced here from its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from observed_calls import Seen, observation
from penteract.config.files.hardware_schema import DIRECT
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy, policy
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.time.clock import CHAINED, IN, OUT, RUN, START, SYNC, WAIT, Key, Op, ps
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.derive import Order, derive
from penteract.readings.time.numbered_schedule import Post, numbered_schedule
from penteract.readings.time.rank_clock import MESSAGE
from penteract.readings.time.step import StepClock
from strategies import cases, cast_once_cases, fp8_gather_cases

NODE = cluster("8xH100")
NARROW = replace(RECIPES["bf16"], reduce="bf16")
PRECISIONS = [RECIPES["fp64"], RECIPES["bf16"], NARROW]
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]
WORK = {"narrow": "narrow gradients", "widen": "widen gradients", "wait_reduce_scatter": "add gradients",
"measure": "gradient norm: squares",
        "update": "update", "quantise": "quantise weights"}  # fmt: skip
BESIDE_NOTES = {"largest weights", "orthogonalise"}  # computed by what an observer takes for one thing
Event = tuple[Any, ...]


def steps_of(case: Case, *, skip_repeats: bool = True) -> StepClock:
    """With the library's times of all collectives: the run that is observed has its communicator."""
    composer = Composer(case.model, case.sequence_length, policy(case.precision), case.optimizer_kinds)
    rates = Rates.of(NODE, "bf16", fp8=composer.policy.fp8 is not None)
    measured = {key: curve for key, curve in rates.interconnect.measured.items() if key[0] not in DIRECT}
    rates = replace(rates, interconnect=replace(rates.interconnect, measured=measured, costs={}))
    return StepClock(composer, NODE, rates, skip_repeats=skip_repeats)


class Told:
    """A rank's program as events, every run unrolled; what is started is numbered."""

    def __init__(self, steps: StepClock, layout: Layout, r: int) -> None:
        line = numbered_schedule(layout.schedule, layout.pp, layout.vpp, layout.gradient_accumulation_steps)
        self.program: ClockProgram = steps.clock_program(layout, steps.composer.bucket_planner.runs(layout, r), r)
        self.ranks = {stream: group for group, stream in self.program.ops.streams.by_ranks.items()}
        self.seen: list[Event] = []
        self.started = 0
        self.in_flight: dict[Key, int] = {}
        self.coming: dict[int, int] = {}
        derived, clock, sent = derive(self.program, Order.of(line.computes[r])), self.program.clock, list[int]()
        self._action(derived.opening)
        for item in line.todo[r]:
            if item < 0:
                sent = self._post(line.posts[r][~item], sent)
            else:
                self.in_flight[MESSAGE] = self.coming.pop(line.reads[r][item], -1)
                self._action(derived.actions[item])
        self._waits(sent)
        self._action(derived.closing)
        for segment, unit, _ in derived.update:
            self._tell(clock.ops[segment], unit)

    def _action(self, action: int) -> None:
        for segments, times, stride in self.program.clock.loops[action]:
            for turn in range(times):
                for segment, unit, needs in segments:
                    self.in_flight |= {("p", 0, i): self.in_flight.pop(("u", b, 0), -1) for i, b in enumerate(needs)}
                    self._tell(self.program.clock.ops[segment], unit + turn * stride)

    def _tell(self, ops: tuple[Op, ...], unit: int) -> None:
        def absolute(key: Key) -> Key:
            return (key[0], key[1] + unit, key[2]) if key[0] in "grcu" else key

        for op in ops:
            match op:
                case (kind, _, _, name) if kind == RUN:
                    self.seen += [("compute", name)] if name not in BESIDE_NOTES else []
                case (kind, key, _, _) if kind == WAIT:
                    self._waits([self.in_flight.pop(absolute(key), -1)])
                case (kind, _) if kind == SYNC:
                    pass
                case (kind, stream, took, key, name) if kind == START:
                    self._start(stream, None if "all_to_all_v" in name else took, absolute(key))
                case (kind, waited, before, stream, took, key, _) if kind == CHAINED:
                    self._waits([self.in_flight.pop(absolute(waited), -1)])
                    self.seen += [("compute", "narrow gradients")] if before else []
                    self._start(stream, took, absolute(key))

    def _start(self, stream: int, took: int | None, key: Key) -> None:
        way = {OUT: "to_host", IN: "from_host"}.get(stream)
        self.seen.append(("start", self.ranks.get(stream, way), took, self.started))
        self.in_flight[key] = self.started
        self.started += 1

    def _waits(self, numbers: list[int]) -> None:
        self.seen += [("wait", n) for n in numbers if n >= 0]

    def _post(self, post: Post, sent: list[int]) -> list[int]:
        """Every message has a number; what was sent before is waited for first."""
        self._waits(sent)
        numbers = {i: self.started + k for k, (i, _) in enumerate(post.messages)}
        self.seen += [("message", n) for n in numbers.values()]
        self.started += len(numbers)
        self.coming |= {i: n for i, n in numbers.items() if i not in post.sends}
        return [n for i, n in numbers.items() if i in post.sends]


def seen_from_outside(case: Case, rank: int, rates: Rates) -> Iterator[Event]:
    """What a run does, in the same ops."""
    p = case.compile(rank)
    seen, _ = observation(p)
    axes = {axis: p.mesh.group(axis, rank) for axis in ("cp", "pp")}
    numbers = set[int]()
    for s in _quantised_once_a_bucket(seen):
        match s.what:
            case "kernel":
                yield "compute", f"{s.phase} {s.name} ({s.line})"
            case "start":
                took = ps(rates.collective(s.name, GroupSpan.of(s.ranks, 8), s.bytes))
                yield "start", s.ranks, None if s.name == "all_to_all_v" else took, s.number  # its rows are data
            case "copy":
                yield "start", s.name, ps(rates.copy(s.name, s.bytes)), s.number
            case "send" | "recv" if s.number not in numbers:
                numbers.add(s.number)
                yield "message", s.number
            case "wait":
                yield "wait", s.number
            case "send" | "recv":
                pass
            case _:
                yield "compute", WORK[s.what]
    assert axes


def _quantised_once_a_bucket(seen: list[Seen]) -> list[Seen]:
    return [s for i, s in enumerate(seen) if s.what != "quantise" or i == 0 or seen[i - 1].what != "quantise"]


def check(case: Case, of: int) -> None:
    lay = case.layout
    steps, mesh = steps_of(case), Mesh(lay)
    r = of % lay.pp
    rank = mesh.group("pp", 0)[r]
    told = Told(steps, lay, r).seen
    shifts = _shifts(case, rank) if case.layout.cp_method == "ring" else set[int]()
    ring = mesh.group("cp", rank)
    told = [("message", e[3]) if e[0] == "start" and e[1] == ring and e[3] in shifts else e for e in told]
    wanted = list(seen_from_outside(case, rank, steps.rates))
    for i, (a, b) in enumerate(zip(told, wanted, strict=False)):
        assert a == b, f"at {i}: {told[max(0, i - 5) : i + 3]}\n{wanted[max(0, i - 5) : i + 3]}"
    assert len(told) == len(wanted)


def _shifts(case: Case, rank: int) -> set[int]:
    return {s.number for s in observation(case.compile(rank)).seen if s.what == "send"}


@draws(20, wide=250)
@given(cases(), st.integers(0, 3), st.integers(0, 7), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS))
def test_plays_what_a_run_does(
    case: Case, deeper: int, of: int, precision: Policy, optimizer_kinds: OptimizerKinds
) -> None:
    assume(not case.schedule)
    if optimizer_kinds is not PLAIN:
        case = replace(case, layout=replace(case.layout, offload_optimizer=False))
    model = replace(case.model, layers=case.model.layers + deeper)
    check(replace(case, model=model, precision=precision, optimizer_kinds=optimizer_kinds), of)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(cast_once_cases(), st.integers(0, 7))
def test_and_where_operands_are_cast_once(case: Case, of: int) -> None:
    assume(not case.schedule)
    check(replace(case, layout=replace(case.layout, elementwise="reference")), of)


@draws(10, wide=100)
@given(fp8_gather_cases(), st.integers(0, 7))
def test_and_where_weights_travel_in_fp8(case: Case, of: int) -> None:
    assume(not case.schedule)
    check(case, of)

"""The timeline of a step: every call, collective, wait and copy of every pipeline rank, with its stream, start, end and
origin. No period is skipped, so it covers the whole step. Events are emitted one by one, so a writer need not keep them
all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.parallel.bucket_plans import NONE
from penteract.parallel.pipeline import stage_layers
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD
from penteract.readings.layers.reads import Memos
from penteract.readings.time.clock import COMPUTE, FIRST, HOST, IN, OUT, SIDE
from penteract.readings.time.clock_program import ClockProgram
from penteract.readings.time.numbered_schedule import NumberedMessage
from penteract.readings.time.rank_clock import RankClock
from penteract.readings.time.ranks import Ranks
from penteract.readings.time.step import StepClock
from penteract.step import names

_STREAMS = {COMPUTE: "compute", HOST: "host", SIDE: "waits beside compute", OUT: "copies to the host",
            IN: "copies from the host"}  # fmt: skip
_AXES = tuple(name for name in AXES if name != "pp")


class Event(NamedTuple):
    """An event on one stream of a pipeline rank, in picoseconds from when the first one begins the step.

    action  such as "F3" (forward of micro-batch 3); "" outside of the actions
    unit    "embedding", "layer 7", "head", or ""; of a message, its micro-batch
    """

    pp_rank: int  # a pipeline coordinate
    stream: str
    name: str
    start: int
    end: int
    action: str = ""
    unit: str = ""


Emit = Callable[[Event], None]


class StepSpan(NamedTuple):
    """The picoseconds of a step, the same for every pipeline rank, and when each begins it.

    A rank begins as soon as its own update is done, so ranks begin at different times.
    """

    picoseconds: int
    begins: tuple[int, ...]


@dataclass(slots=True)
class Timeline:
    """Events of a step mid-run, and its length. A gather after the update may continue into the next step; likewise,
    collectives of the step before may be in flight at the beginning."""

    layout: Layout
    span: StepSpan
    events: list[Event]

    @property
    def picoseconds(self) -> int:
        """The length of the step, the same for every pipeline rank."""
        return self.span.picoseconds

    def of(self, pp_rank: int) -> Iterator[Event]:
        """The events of one pipeline rank, by their start."""
        return iter(sorted((e for e in self.events if e.pp_rank == pp_rank), key=lambda e: (e.start, e.end)))


@dataclass(slots=True)
class _Writer:
    """Turns ops of rank clocks and messages into events, once `emit` is set.

    zero   when the first pipeline rank begins; `begins`: when each does
    took   how long the step is
    wires  collectives outside of the actions: they may be in flight when the next step begins
    """

    layout: Layout
    layers: int
    ranks: Ranks | None = None
    emit: Emit | None = None
    zero: int = 0
    begins: Sequence[int] = ()
    took: int = 0
    wires: list[Event] = field(default_factory=list[Event])
    numbers: dict[int, int] = field(default_factory=dict[int, int])  # the rank of each clock, by its identity
    streams: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    units: list[Sequence[str]] = field(default_factory=list[Sequence[str]])

    def attach(self, ranks: Ranks) -> None:
        """Take the clocks, streams and units of these ranks."""
        self.ranks, mesh = ranks, Mesh(self.layout)
        self.numbers = {id(m): r for r, m in enumerate(ranks.rank_clocks)}
        self.streams = [_named(program, mesh) for program in ranks.programs]
        self.units = [_units(self.layout, self.layers, r, program) for r, program in enumerate(ranks.programs)]
        ranks.log = self.message

    def op(self, m: RankClock, stream: int, name: str, start: int, end: int) -> None:
        """Emit an op of a rank."""
        if self.emit is None:
            return
        assert self.ranks is not None
        r = self.numbers[id(m)]
        action = str(self.ranks.schedule.computes[r][m.doing]) if m.doing != NONE else ""
        unit = self.units[r][m.unit] if action and m.unit < len(self.units[r]) else ""
        where = _STREAMS[stream] if stream in _STREAMS else self.streams[r][stream]
        if stream == HOST and start < self.begins[r]:  # a step ahead: meanwhile it launches the same of the next step
            start, end = start + self.took, end + self.took
        event = Event(r, where, name, start - self.zero, end - self.zero, action, unit)
        if stream >= FIRST and not action:
            self.wires.append(event)
        self.emit(event)

    def message(self, m: NumberedMessage, start: int, end: int) -> None:
        """Emit a message at both of its ends."""
        if self.emit is None:
            return
        what, of = m.where[0], f"micro-batch {m.micro}"
        carried = "activations" if what == "value" else "gradients"
        ends = (m.source, "send", f"to pp rank {m.target}"), (m.target, "recv", f"from pp rank {m.source}")
        for r, way, other in ends:
            name = names.of_message(way, what)
            self.emit(Event(r, f"{carried} {other}", name, start - self.zero, end - self.zero, unit=of))


def emit_events(steps: StepClock, layout: Layout, emit: Emit) -> StepSpan:
    """Emit one step of a layout, mid-run, event by event. The events of one stream come in their order, but for the
    host's: what it launched before the step began stands where it launches the same of the next step."""
    writer = _Writer(layout, steps.composer.model.layers)
    alone = replace(steps, skip_repeats=False, log=writer.op, clocks={}, memos=Memos(), derived={})
    ranks, steady = alone.build(layout, 0), steps.ranks(layout)
    before, took = len(steady.ends) - 1, steady.last
    writer.attach(ranks)
    _remember(alone, yes=True)
    for _ in range(before):
        ranks.step()
    _remember(alone, yes=False)  # the last step is logged, op by op
    begins = [m.now for m in ranks.rank_clocks]
    writer.zero, writer.emit, writer.begins, writer.took = min(begins), emit, begins, took
    if ranks.hosts_ahead:  # each began to launch this step when the device began the one before
        ranks.hosts_ahead = False
        for m in ranks.rank_clocks:
            m.host = m.now - took
    ranks.step()
    for e in writer.wires:  # the step before has left the same collectives in flight
        begin = begins[e.pp_rank] - writer.zero
        if e.end - took > begin:
            emit(e._replace(start=max(begin, e.start - took), end=e.end - took))
    return StepSpan(took, tuple([begin - writer.zero for begin in begins]))


def _remember(steps: StepClock, *, yes: bool) -> None:
    for clock in steps.clocks.values():
        clock.remembers = yes


def timeline(steps: StepClock, layout: Layout) -> Timeline:
    """All events of one step of a layout."""
    events = list[Event]()
    return Timeline(layout, emit_events(steps, layout, events.append), events)


def _named(program: ClockProgram, mesh: Mesh) -> list[str]:
    """Name each stream of a process group after its axis. Groups of no axis that have equal sizes are numbered."""
    rank, found, alike = program.ops.streams.rank, dict[int, str](), Counter[int]()
    for ranks, number in program.ops.streams.by_ranks.items():
        axes = [axis for axis in _AXES if mesh.group(axis, rank) == ranks]
        alike[len(ranks)] += not axes
        which = axes[0] if axes else "shards" if alike[len(ranks)] == 1 else f"shards {alike[len(ranks)]}"
        found[number] = f"{which} ({len(ranks)} ranks)"
    return [found.get(i, "") for i in range(max(found, default=0) + 1)]


def _units(layout: Layout, layers: int, r: int, program: ClockProgram) -> list[str]:
    """The name of each unit of a rank."""
    cut, out = stage_layers(layers, layout), list[str]()
    for s, units in zip(layout.placement.stages[r], program.chunks, strict=True):
        own = iter(cut[s])
        kinds = [program.layer_types[unit] for unit in units]
        out += [kind.name if kind in EMBEDDING_AND_HEAD else f"layer {next(own)}" for kind in kinds]
    return out

"""The timeline of a step: every call, wire, wait and copy of every stage, with its stream, from when to when, and what
it is of. Nothing is jumped, so it is as long as the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.estimate.pieces import ENDS
from penteract.estimate.reads import Memos
from penteract.estimate.time.clock import COMPUTE, HOST, IN, OUT, SIDE
from penteract.estimate.time.line import Message
from penteract.estimate.time.machine import Machine
from penteract.estimate.time.ranks import Ranks
from penteract.estimate.time.stage import Stage
from penteract.estimate.time.step import StepClock
from penteract.parallel.data import NONE
from penteract.parallel.pipeline import stage_layers
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.step import names

_STREAMS = {COMPUTE: "compute", HOST: "host", SIDE: "waits beside compute", OUT: "copies to the host",
            IN: "copies from the host"}  # fmt: skip
_AXES = ("tp", "cp", "ep", "sequence", "dp", "stage", "world")
_MESSAGES = "messages"


class Event(NamedTuple):
    """What one stream of a stage does, in picoseconds from the beginning of the step.

    action  such as "F3": of micro-batch 3; "" outside of the actions
    unit    "embedding", "layer 7", "head", or "" where it is of none
    """

    stage: int  # a pipeline coordinate
    stream: str
    name: str
    start: int
    end: int
    action: str = ""
    unit: str = ""


@dataclass(slots=True)
class Timeline:
    """Events of a step, and its picoseconds: it begins with what the step before has left under way."""

    layout: Layout
    picoseconds: int
    events: list[Event]

    def of(self, stage: int) -> Iterator[Event]:
        """Those of one stage, as they begin."""
        return iter(sorted((e for e in self.events if e.stage == stage), key=lambda e: (e.start, e.end)))


@dataclass(slots=True)
class _Writer:
    """Takes down what machines and messages tell."""

    layout: Layout
    layers: int
    ranks: Ranks | None = None
    begun: int = 0
    events: list[Event] = field(default_factory=list[Event])
    numbers: dict[int, int] = field(default_factory=dict[int, int])  # of machines, by identity
    streams: list[Sequence[str]] = field(default_factory=list[Sequence[str]])
    units: list[Sequence[str]] = field(default_factory=list[Sequence[str]])

    def attach(self, ranks: Ranks) -> None:
        """Whose machines and streams they are."""
        self.ranks, mesh = ranks, Mesh(self.layout)
        self.numbers = {id(m): r for r, m in enumerate(ranks.machines)}
        self.streams = [_named(stage, mesh) for stage in ranks.stages]
        self.units = [_units(self.layout, self.layers, r, stage) for r, stage in enumerate(ranks.stages)]
        ranks.log = self.message

    def op(self, m: Machine, stream: int, name: str, start: int, end: int) -> None:
        """What a machine tells."""
        assert self.ranks is not None
        r = self.numbers[id(m)]
        action = str(self.ranks.line.computes[r][m.doing]) if m.doing != NONE else ""
        unit = self.units[r][m.unit] if action and m.unit < len(self.units[r]) else ""
        where = _STREAMS[stream] if stream in _STREAMS else self.streams[r][stream]
        self.events.append(Event(r, where, name, start, end, action, unit))

    def message(self, m: Message, start: int, end: int) -> None:
        """What a message is at both of its ends."""
        of = f"micro-batch {m.micro}"
        for r, way, other in ((m.source, "send", m.target), (m.target, "recv", m.source)):
            stream = f"{_MESSAGES} {'to' if way == 'send' else 'from'} stage {other}"
            self.events.append(Event(r, stream, names.of_message(way, m.where[0]), start, end, of))


def timeline(steps: StepClock, layout: Layout) -> Timeline:
    """Of one step of a layout, mid-run."""
    writer = _Writer(layout, steps.composer.model.layers)
    alone = replace(steps, jumps=False, log=writer.op, clocks={}, memos=Memos(), derived={})
    ranks = alone.build(layout, 0)
    writer.attach(ranks)
    ranks.step()
    begun = 0
    while not ranks.steady:
        begun = ranks.ends[-1]
        writer.events.clear()
        ranks.step()
    events = [e._replace(start=e.start - begun, end=e.end - begun) for e in writer.events]
    return Timeline(layout, ranks.last, events)


def _named(stage: Stage, mesh: Mesh) -> list[str]:
    """Each stream of a process group, by the axes that it serves."""
    rank, found = stage.ops.streams.rank, dict[int, str]()
    for ranks, number in stage.ops.streams.by_ranks.items():
        axes = [axis for axis in _AXES if mesh.group(axis, rank) == ranks]
        found[number] = f"{axes[0] if axes else 'shards'} ({len(ranks)} ranks)"
    return [found.get(i, "") for i in range(max(found, default=0) + 1)]


def _units(layout: Layout, layers: int, r: int, stage: Stage) -> list[str]:
    """What each unit of a rank is."""
    cut, out = stage_layers(layers, layout.stages), list[str]()
    for s, units in zip(layout.placement.stages[r], stage.chunks, strict=True):
        own = iter(cut[s])
        out += [kind.name if (kind := stage.row[unit]) in ENDS else f"layer {next(own)}" for unit in units]
    return out

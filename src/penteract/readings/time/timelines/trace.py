"""A timeline as a Chrome trace, which Perfetto opens: a process for each pipeline rank, a thread for each
stream, memory as a counter."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.ops.tape import Call, Site
from penteract.readings.buckets.planned import first_rank
from penteract.readings.layers.expert_load import Load
from penteract.readings.price import Pricing, gather_workspace, resident, update_workspace
from penteract.readings.time.step import StepClock
from penteract.readings.time.timelines.timeline import Event, StepSpan, emit_events
from penteract.step import names, update
from penteract.step.arena import plan_arena
from penteract.step.program import BufferKey, Program, compile_step
from penteract.step.walk import walk
from penteract.units import Bytes

_OWN = ("compute", "host", "waits beside compute")
COMPUTED = ("forward", "input_gradient", "weight_gradient")
BYTES = "memory"


@dataclass(slots=True)
class MemoryTrace(Pricing):
    """The reading that prices, with the bytes alive at each computing call, in order.

    arena, outside  bytes of registers while a call runs: in the arena, and those of routed size; `…_after`: after it
    workspace       what the kernel of a call allocates
    high            the most of `outside` since the last call: it is recorded with the next one
    narrowed        arena, outside and workspace while each bucket's gradients are cast before their reduction
    """

    arena: array[int] = field(default_factory=lambda: array("q"))
    outside: array[int] = field(default_factory=lambda: array("q"))
    workspace: array[int] = field(default_factory=lambda: array("q"))
    arena_after: array[int] = field(default_factory=lambda: array("q"))
    outside_after: array[int] = field(default_factory=lambda: array("q"))
    narrowed: list[tuple[Bytes, Bytes, Bytes]] = field(default_factory=list[tuple[Bytes, Bytes, Bytes]])
    noted: Bytes = 0
    high: Bytes = 0

    def call(self, buffer: BufferKey, call: Call) -> None:
        Pricing.call(self, buffer, call)
        if call.phase in ("start", "finish"):
            return
        for column in (self.arena, self.arena_after):
            column.append(self.now - self.routed)
        self.outside.append(max(self.high, self.routed))
        self.outside_after.append(self.routed)
        self.workspace.append(self.noted)
        self.high = 0

    def _hold(self, buffer: BufferKey, register: int, amount: Bytes) -> None:
        Pricing._hold(self, buffer, register, amount)
        self.high = max(self.high, self.routed)

    def _note(self, workspace: Bytes, site: Site | None) -> None:
        Pricing._note(self, workspace, site)
        self.noted = workspace

    def reduce(self, bucket: int) -> None:
        Pricing.reduce(self, bucket)
        if self.p.buckets[bucket].summed:
            self.narrowed.append((self.now - self.routed, self.routed, self.noted))

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        Pricing.free(self, buffer, registers)
        if self.arena:
            self.arena_after[-1], self.outside_after[-1] = self.now - self.routed, self.routed


@dataclass(slots=True)
class MemoryCounter:
    """The bytes of one rank, call after call.

    resident    bytes that are always allocated, by owner; `block`: the arena's, of which registers use a part
    workspaces  the most that bucket events of a name allocate; not of casts of gradients, beside which registers of
                routed size may be alive: with the most of all buckets they would be more than is ever allocated
    """

    resident: Mapping[str, Bytes]
    block: Bytes
    trace: MemoryTrace
    workspaces: Mapping[str, Bytes]
    place: int = 0
    narrowed: int = 0

    @staticmethod
    def of(p: Program, load: Load) -> MemoryCounter:
        """Price one rank's step call after call, and the workspaces of its bucket events. `load`: its experts' rows."""
        trace = MemoryTrace(p, load)
        walk(p, trace)
        buckets, elementwise = p.buckets, p.layout.elementwise
        workspaces = {
            names.MEASURE: [update.norm_workspace(p.precision, elementwise)],
            names.UPDATE: [update_workspace(b, p.precision, elementwise) for b in buckets],
            names.QUANTISE: [gather_workspace(b, elementwise) for b in buckets],
        }
        most = {name: max(some, default=0) for name, some in workspaces.items()}
        return MemoryCounter({k: n for k, n in resident(p).items() if n}, plan_arena(p).size, trace, most)

    def around(self, e: Event) -> tuple[Mapping[str, Bytes], Mapping[str, Bytes]] | None:
        """Bytes by owner while an event of compute runs, and after it; None if it changes nothing."""
        trace, i = self.trace, self.place
        if e.name.split(" ", 1)[0] in COMPUTED:
            self.place += 1
            return (self._now(trace.arena[i], trace.outside[i], trace.workspace[i]),
                    self._now(trace.arena_after[i], trace.outside_after[i], 0))  # fmt: skip
        before = (trace.arena_after[i - 1], trace.outside_after[i - 1]) if i else (0, 0)
        if e.name == names.NARROW:
            self.narrowed += 1
            return self._now(*trace.narrowed[self.narrowed - 1]), self._now(*before, 0)
        if own := self.workspaces.get(e.name):
            return self._now(*before, own), self._now(*before, 0)
        return None

    def _now(self, arena: Bytes, outside: Bytes, workspace: Bytes) -> Mapping[str, Bytes]:
        """Bytes by owner. `arena, free`: the part of the arena without a live register."""
        return {**self.resident, "activations": arena + outside, "workspace": workspace,
                "arena, free": self.block - arena}  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether the timeline had every call of the program."""
        return self.place == len(self.trace.workspace)


def program(steps: StepClock, layout: Layout, pp_rank: int) -> Program:
    """The program of the first of the ranks with this pipeline coordinate."""
    return rank_program(steps, layout, first_rank(Mesh(layout), pp_rank))


def rank_program(steps: StepClock, layout: Layout, rank: int) -> Program:
    """The program of a rank."""
    c = steps.composer
    return compile_step(c.model, layout, c.sequence_length, rank=rank, precision=c.policy,
                        optimizer_kinds=c.optimizer_kinds)  # fmt: skip


def write_trace(
    steps: StepClock, layout: Layout, write: Callable[[str], object], pp_ranks: Collection[int]
) -> StepSpan:
    """Write the JSON of a layout's step, part by part while it is simulated."""
    file = _Trace(write, {r: _RankTracks.of(steps, layout, r) for r in sorted(pp_ranks)})
    write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for rank in file.ranks.values():
        file.put(rank.named())
    span = emit_events(steps, layout, file.event)
    for rank in file.ranks.values():
        file.put(rank.last(span.begins[rank.number] + span.picoseconds))
        assert rank.memory.done, "a timeline and its program have the same calls"
    write("\n]}\n")
    return span


@dataclass(slots=True)
class _Trace:
    write: Callable[[str], object]
    ranks: Mapping[int, _RankTracks]
    first: bool = True

    def event(self, e: Event) -> None:
        if (rank := self.ranks.get(e.pp_rank)) is not None:
            self.put(rank.rows(e))

    def put(self, rows: Iterator[dict[str, Any]]) -> None:
        for row in rows:
            self.write(("" if self.first else ",\n") + json.dumps(row))
            self.first = False


@dataclass(slots=True)
class _RankTracks:
    """Rows of a pipeline rank. The memory after a call is written unless the next begins at the same moment."""

    number: int
    program: Program
    memory: MemoryCounter
    threads: dict[str, int] = field(default_factory=dict[str, int])
    left: tuple[int, Mapping[str, Bytes]] | None = None

    @staticmethod
    def of(steps: StepClock, layout: Layout, number: int) -> _RankTracks:
        """The rows of a pipeline rank of a layout's step."""
        p = program(steps, layout, number)
        return _RankTracks(number, p, MemoryCounter.of(p, steps.composer.load(layout)))

    @property
    def process(self) -> int:
        """The process id, from 1: viewers treat process 0 as idle."""
        return self.number + 1

    def named(self) -> Iterator[dict[str, Any]]:
        first = 1000 * self.process
        yield self._meta(first, "process_name", name=f"pp rank {self.number} (rank {self.program.rank})")
        yield self._meta(first, "process_sort_index", sort_index=self.number)
        yield self._bytes(0, self.memory._now(0, 0, 0))

    def rows(self, e: Event) -> Iterator[dict[str, Any]]:
        thread = self.threads.get(e.stream)
        if thread is None:
            # Perfetto sorts by this number; it places 0, and a thread with its process's number, apart from the others.
            at = _place(e.stream)
            thread = 1000 * self.process + 100 * at + sum(_place(stream) == at for stream in self.threads)
            self.threads[e.stream] = thread
            yield self._meta(thread, "thread_name", name=e.stream)
            yield self._meta(thread, "thread_sort_index", sort_index=thread)
        (name, line), start, end = shown_name(e), _nanoseconds(e.start), _nanoseconds(e.end)
        yield {
            "ph": "X", "pid": self.process, "tid": thread, "name": name, "cat": kind(e),
            "ts": _moment(start), "dur": (end - start) / 1000,
            "args": {k: v for k, v in (("action", e.action), ("of", e.unit), ("line", line)) if v},
        }  # fmt: skip
        if e.stream == "compute" and (around := self.memory.around(e)) is not None:
            if self.left is not None and self.left[0] < e.start:
                yield self._bytes(*self.left)
            yield self._bytes(e.start, around[0])
            self.left = e.end, around[1]

    def last(self, end: int) -> Iterator[dict[str, Any]]:
        """Repeat the last bytes at the end of the step: Chrome draws a counter only up to its last row."""
        if self.left is not None:
            yield self._bytes(*self.left)
            yield self._bytes(end, self.left[1])

    def _bytes(self, at: int, owners: Mapping[str, Bytes]) -> dict[str, Any]:
        return {"ph": "C", "pid": self.process, "name": BYTES, "ts": _moment(_nanoseconds(at)), "args": owners}

    def _meta(self, thread: int, what: str, **args: object) -> dict[str, Any]:
        return {"ph": "M", "pid": self.process, "tid": thread, "name": what, "args": args}


def shown_name(e: Event) -> tuple[str, str]:
    """The name of an event in a viewer, and its line of code if the name leaves it out: on the streams of process
    groups, a call's collective, its axis and the pass, as "all_gather (TP), forward"."""
    started, called, rest = e.name.partition("start ")
    if e.stream in (*_OWN, "") or started or not called:
        return e.name, ""
    what, _, line = rest.removesuffix(")").partition(" (")
    passes = {"F": ", forward", "B": ", backward", "I": ", backward", "W": ", backward"}
    which = "" if "|" in e.action else passes.get(e.action[:1], "")
    axis = e.stream.partition(" (")[0]
    return f"{what} ({axis.upper() if axis in AXES else axis}){which}", line


def _nanoseconds(picoseconds: int) -> int:
    """Whole nanoseconds, as Perfetto uses. It drops a slice that begins before the last ends: so starts and ends are
    rounded alike."""
    return (picoseconds + 500) // 1000


def _moment(nanoseconds: int) -> float:
    """In microseconds. Some viewers round to nanoseconds and some truncate: with a tenth more, both give the same."""
    return (10 * nanoseconds + 1) / 10_000


def _place(stream: str) -> int:
    """The place of a stream's track in its rank: the rank's own streams, process groups, messages, copies."""
    if stream in _OWN:
        return _OWN.index(stream)
    if stream.startswith("copies"):
        return 5
    return 4 if " pp rank " in stream else 3


def kind(e: Event) -> str:
    """The category of an event, by which a viewer filters and colours."""
    if e.stream == "host":
        return "launch"
    if e.stream != "compute":
        return "copy" if e.stream.startswith("copies") else "communication"
    op_name = e.name.split(" ", 1)[0]
    if op_name in COMPUTED:
        return op_name
    return "bucket" if op_name not in _WAITS or e.name == names.LARGEST else "wait"


OtherStream = Literal["message", "gather", "collective", "copy"]


def other_stream(e: Event) -> OtherStream | None:
    """What runs on another stream than compute; None for the host's launches, and for waits."""
    what = kind(e)
    if what not in ("communication", "copy") or e.stream.startswith("waits"):
        return None
    if what == "copy":
        return "copy"
    if " pp rank " in e.stream:
        return "message"
    return "gather" if "all_gather" in e.name else "collective"


# On the compute stream, events with these names are waits for collectives and copies.
_WAITS = frozenset(("wait", "finish", "copy", "largest", "all_reduce", "all_gather", "reduce_scatter"))

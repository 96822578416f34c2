"""A timeline as a Chrome trace, which Perfetto opens: a process a stage, a thread a stream, and bytes as a counter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penteract.estimate.load import Balanced
from penteract.estimate.price import Price, Pricing, resident
from penteract.estimate.time.timeline import Event, Timeline
from penteract.ops.tape import Call
from penteract.step.program import Program, Slot
from penteract.step.walk import walk
from penteract.units import Bytes

_MICROSECOND = 10**6  # picoseconds
_FIRST = ("host", "compute")


@dataclass(slots=True)
class MemoryCurve(Pricing):
    """The reading that prices, with the bytes of registers after every call that computes."""

    curve: list[Bytes] = field(default_factory=list[Bytes])

    def call(self, slot: Slot, call: Call) -> None:
        Pricing.call(self, slot, call)
        if call.phase not in ("start", "finish"):
            self.curve.append(self.now)


def memory_of(p: Program) -> tuple[Mapping[str, Bytes], Sequence[Bytes]]:
    """What a rank holds all the time, by owner; and what its registers take after each call that computes, in order."""
    curve = MemoryCurve(p, Balanced.of(p.model, p.layout, p.sequence_length), Price())
    walk(p, curve)
    return resident(p), curve.curve


def chrome_trace(told: Timeline, programs: Mapping[int, Program]) -> Iterator[str]:
    """The lines of a JSON file. `programs`: of the first rank of each stage that is to be in it."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    first = True
    for stage, program in sorted(programs.items()):
        for event in _stage(stage, list(told.of(stage)), program):
            yield ("" if first else ",\n") + json.dumps(event)
            first = False
    yield "\n]}\n"


def _stage(stage: int, events: Sequence[Event], program: Program) -> Iterator[dict[str, Any]]:
    streams = sorted({e.stream for e in events}, key=lambda s: (s not in _FIRST, s))
    threads = {stream: i for i, stream in enumerate(streams)}
    yield _meta(stage, 0, "process_name", f"stage {stage} (rank {program.rank})")
    for stream, i in threads.items():
        yield _meta(stage, i, "thread_name", stream)
        yield {"ph": "M", "pid": stage, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}}
    for e in events:
        yield {
            "ph": "X", "pid": stage, "tid": threads[e.stream], "name": e.name, "ts": e.start / _MICROSECOND,
            "dur": (e.end - e.start) / _MICROSECOND,
            "args": {k: v for k, v in (("action", e.action), ("of", e.unit)) if v},
        }  # fmt: skip
    yield from _counters(stage, (e for e in events if e.stream == "compute" and e.action), program)


def _counters(stage: int, computing: Iterable[Event], program: Program) -> Iterator[dict[str, Any]]:
    """Bytes by owner, where they change."""
    held, after = memory_of(program)
    calls = [e for e in computing if e.name.split(" ")[0] in ("forward", "input_gradient", "weight_gradient")]
    assert len(calls) == len(after), "a timeline and its program have the same calls"
    for e, now in zip(calls, after, strict=True):
        owners = {**{owner: n for owner, n in held.items() if n}, "activations": now}
        yield {"ph": "C", "pid": stage, "name": "bytes by owner", "ts": e.end / _MICROSECOND, "args": owners}


def _meta(stage: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": stage, "tid": thread, "name": what, "args": {"name": name}}

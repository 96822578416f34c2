"""What torch's profiler exports (Chrome's trace events), as spans of a step under the names of its program."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penteract.step import names

Kind = Literal["call", "compute", "collective", "wait", "copy"]
TraceRows = Sequence[Mapping[str, Any]]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Calls in which a step waits for others: of a CPU run, what is not an operator in them is waiting.
WAITING = ("finish ", "wait ", "all_reduce ", "recv ", names.ADD, names.WIDEN)
_OF_TORCH = ("gloo:", "nccl:", "unknown")  # annotations by torch itself, within those of the program
# torch's operator that starts a collective -> gloo's own event of it.
_GLOO = {
    "c10d::_allgather_base_": "gloo:all_gather", "c10d::allgather_": "gloo:all_gather",
    "c10d::allreduce_": "gloo:all_reduce", "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::alltoall_base_": "gloo:all_to_all", "c10d::alltoall_": "gloo:all_to_all",
}  # fmt: skip


class Span(NamedTuple):
    """Something that took time in a step, in nanoseconds from the step's beginning.

    kind    "call": of the host, a part of the program; on the device, or on a CPU in torch's operators: "compute",
            "collective" (also while it is hidden), "copy"; "wait": a CPU waits for one
    name    of the program's part that launched it; "" for none
    kernel  its kernel or operator; "" for a call
    asked   on a device: when the host asked for it
    """

    kind: Kind
    name: str
    kernel: str
    begin: int
    nanoseconds: int
    stream: int = 0
    asked: int = 0

    @property
    def end(self) -> int:
        """When it is over."""
        return self.begin + self.nanoseconds

    def since(self, moment: int) -> Span:
        """The same, in nanoseconds from a moment."""
        return self._replace(begin=self.begin - moment, asked=self.asked - moment)


class RecordedStep(NamedTuple):
    """One step of a rank. `begin`: nanoseconds since 1970; `nanoseconds`: until it ends."""

    begin: int
    nanoseconds: int
    spans: list[Span]


def step_name(number: int) -> str:
    """The annotation of a whole step."""
    return f"step {number}"


def recorded_steps(exported: Mapping[str, Any], numbers: Sequence[int]) -> list[RecordedStep]:
    """The steps of these numbers. A step lasts from the end of the one before it, which must be in the trace too: on a
    GPU to the end of what it computes last, on a CPU to the end of its annotation.

    On a GPU the collectives of a step's end may go on beside the next step. They belong to the step in whose time they
    begin, whichever launched them; calls belong to the step that makes them.
    """
    rows: TraceRows = exported["traceEvents"]
    base = int(exported.get("baseTimeNanoseconds", 0))
    spans, ends = dict[int, list[Span]](), dict[int, int]()
    on_device = any(row.get("cat") in _ON_DEVICE for row in rows)
    for number in (numbers[0] - 1, *numbers):
        whole = _annotation(rows, step_name(number))
        found = device_spans(rows, step_name(number)) if on_device else host_spans(rows, step_name(number))
        begin = nanoseconds(whole["ts"])
        spans[number] = [span.since(-begin) for span in found]
        ran = [s for s in spans[number] if s.kind != "call"] if on_device else []
        last = max((s.end for s in ran if s.kind == "compute"), default=max((s.end for s in ran), default=0))
        ends[number] = last or begin + nanoseconds(whole["dur"])
    ran = [span for some in spans.values() for span in some if span.kind != "call"]
    steps = list[RecordedStep]()
    for number in numbers:
        begin, end = ends[number - 1], ends[number]
        own = spans[number]
        if on_device:
            own = [s for s in own if s.kind == "call"] + [s for s in ran if begin <= s.begin < end]
        own = [span.since(begin) for span in own]
        own.sort(key=lambda span: span.begin)
        steps.append(RecordedStep(base + begin, end - begin, own))
    return steps


def device_spans(rows: TraceRows, step: str) -> list[Span]:
    """The kernels and copies that a GPU's step launched, and its calls. Times count from its annotation."""
    parts = _Parts(rows, step)
    launched = {row["args"]["correlation"]: row["ts"] for row in rows
                if row.get("cat") in _LAUNCHES and "correlation" in row.get("args", {})}  # fmt: skip
    spans = list(parts.calls())
    for row in rows:
        if row.get("cat") not in _ON_DEVICE:
            continue
        at = launched.get(row["args"].get("correlation"))
        if at is None or not parts.begin <= at <= parts.end:
            continue
        kernel, stream = str(row["name"]), int(row["args"].get("stream", 0))
        span = parts.span(_kind(row["cat"], kernel), parts.at(at), kernel, row, stream)
        spans.append(span._replace(asked=nanoseconds(at - parts.begin)))
    return sorted(spans, key=lambda span: span.begin)


def host_spans(rows: TraceRows, step: str) -> list[Span]:
    """What a CPU's step did: its calls, torch's operators in them, waits, and gloo's collectives in its own threads."""
    parts = _Parts(rows, step)
    ops = [row for row in _outermost(row for row in rows if row.get("cat") == "cpu_op" and row["tid"] == parts.thread)
           if parts.begin <= row["ts"] < parts.end]  # fmt: skip
    spans = list(parts.calls())
    inside = defaultdict[int, list[Span]](list)
    for row in ops:
        i = parts.index(row["ts"])
        kind: Kind = "copy" if parts.name(i) in ("to_host", "from_host") else "compute"
        inside[i].append(parts.span(kind, parts.name(i), str(row["name"]), row, 0))
    for i, (_, _, name) in enumerate(parts.parts):
        if name.startswith(WAITING):
            spans += _between(parts.call(i), inside[i])
    spans += (span for some in inside.values() for span in some)
    spans += _gloo(rows, parts, ops)
    return sorted(spans, key=lambda span: span.begin)


class _Parts:
    """The annotations of a step, and which one a moment lies in."""

    def __init__(self, rows: TraceRows, step: str) -> None:
        whole = _annotation(rows, step)
        self.thread, self.begin = whole["tid"], whole["ts"]
        self.end = self.begin + whole["dur"]
        self.parts = sorted(
            (row["ts"], row["ts"] + row["dur"], str(row["name"])) for row in rows
            if row.get("cat") == "user_annotation" and row["tid"] == self.thread and row["name"] != step
            and self.begin <= row["ts"] < self.end and not str(row["name"]).startswith(_OF_TORCH)
        )  # fmt: skip
        self.begins = [begin for begin, _, _ in self.parts]

    def index(self, at: float) -> int:
        """The innermost annotation around a moment; -1: none."""
        i = bisect_right(self.begins, at) - 1
        while i >= 0 and self.parts[i][1] < at:
            i -= 1
        return i

    def name(self, i: int) -> str:
        return self.parts[i][2] if i >= 0 else ""

    def at(self, moment: float) -> str:
        return self.name(self.index(moment))

    def call(self, i: int) -> Span:
        begin, end, name = self.parts[i]
        return Span("call", name, "", nanoseconds(begin - self.begin), nanoseconds(end - begin))

    def calls(self) -> Iterator[Span]:
        return (self.call(i) for i in range(len(self.parts)))

    def span(self, kind: Kind, name: str, kernel: str, row: Mapping[str, Any], stream: int) -> Span:
        return Span(kind, name, kernel, nanoseconds(row["ts"] - self.begin), nanoseconds(row["dur"]), stream)


def _annotation(rows: TraceRows, name: str) -> Mapping[str, Any]:
    return next(row for row in rows if row.get("cat") == "user_annotation" and row["name"] == name)


def _kind(category: str, kernel: str) -> Kind:
    if category == "gpu_memcpy":  # from another GPU, on one, or of the host
        return "collective" if "PtoP" in kernel else "compute" if "DtoD" in kernel else "copy"
    return "collective" if "nccl" in kernel.lower() else "compute"


def _outermost(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Operators that no other operator called."""
    until = 0.0
    for row in sorted(rows, key=lambda row: (row["ts"], -row["dur"])):
        if row["ts"] >= until:
            until = row["ts"] + row["dur"]
            yield row


def _between(call: Span, inside: Sequence[Span]) -> Iterator[Span]:
    """The time of a call that is in none of its operators."""
    at = call.begin
    for span in sorted([*inside, Span("wait", "", "", call.end, 0)], key=lambda span: span.begin):
        if span.begin > at:
            yield Span("wait", call.name, "waiting", at, span.begin - at)
        at = max(at, span.end)


def _gloo(rows: TraceRows, parts: _Parts, ops: Iterable[Mapping[str, Any]]) -> Iterator[Span]:
    """gloo's collectives, each named after the call that started it: gloo begins those of a kind in order."""
    waiting = defaultdict[str, deque[Mapping[str, Any]]](deque)
    for row in sorted((row for row in rows if str(row.get("name", "")).startswith("gloo:")), key=_begin):
        if row["tid"] != parts.thread and parts.begin <= row["ts"] < parts.end:
            waiting[str(row["name"])].append(row)
    started = defaultdict[str, list[Mapping[str, Any]]](list)
    for op in ops:
        if kind := _GLOO.get(str(op["name"])):
            started[kind].append(op)
    for kind, some in started.items():
        if len(some) == len(waiting[kind]):
            for op, row in zip(some, waiting[kind], strict=True):
                yield parts.span("collective", parts.at(op["ts"]), kind, row, 1)


_begin: Callable[[Mapping[str, Any]], float] = lambda row: row["ts"]  # noqa: E731 (a key of sorts)


def nanoseconds(microseconds: float) -> int:
    """Whole nanoseconds: the profiler's own unit."""
    return round(1000 * microseconds)

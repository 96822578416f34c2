"""One gzipped Chrome trace of a profile, which Perfetto opens: prediction and measurement as two processes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penteract.measure.profile.prediction import Prediction
from penteract.measure.profile.recording import Recording
from penteract.readings.time.timelines.trace import kind, shown_name

FILE = "trace.json.gz"
_PREDICTION, _MEASUREMENT = 1, 2
_STREAMS = {"call": "host", "compute": "compute", "collective": "collectives", "wait": "waits", "copy": "copies"}
_ON_HOST = {"compute": "operators", "wait": "operators"}  # of a CPU's rank, which computes as it launches


def write_trace_file(path: Path, predicted: Prediction, recordings: Sequence[Recording]) -> None:
    """Write the trace: the predicted step of each pipeline rank, and the profiled steps of each rank."""
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, row in enumerate(trace_rows(predicted, recordings)):
            file.write((",\n" if i else "") + json.dumps(row, ensure_ascii=False))
        file.write("\n]}\n")


def trace_rows(predicted: Prediction, recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """All rows. Threads are numbered by their rows' order, as Perfetto sorts them."""
    yield from _process(_PREDICTION, "prediction")
    yield from _process(_MEASUREMENT, f"measurement, {len(recordings[0].steps)} steps under the profiler")
    threads = dict[tuple[int, str], int]()
    for e in predicted.events:
        thread = f"pipeline rank {e.pp_rank} · {e.stream}"
        yield from _thread(threads, _PREDICTION, thread, e.pp_rank)
        (name, line), about = shown_name(e), (("action", e.action), ("of", e.unit))
        yield _slice(
            _PREDICTION, threads[_PREDICTION, thread], name, kind(e), e.start, e.end - e.start,
            {k: v for k, v in (*about, ("line", line)) if v},
        )  # fmt: skip
    first = min(r.steps[0].begin for r in recordings)
    for r in recordings:
        for step in r.steps:
            at = 1000 * (step.begin - first)
            yield from _thread(threads, _MEASUREMENT, f"rank {r.rank} · steps", r.rank)
            yield _slice(_MEASUREMENT, threads[_MEASUREMENT, f"rank {r.rank} · steps"], "step", "step", at,
                         1000 * step.nanoseconds, {})  # fmt: skip
            for span in step.spans:
                stream = _STREAMS[span.kind] if r.on_device else _ON_HOST.get(span.kind, _STREAMS[span.kind])
                thread = f"rank {r.rank} · {stream}" + (f" {span.stream}" if r.on_device and span.stream else "")
                yield from _thread(threads, _MEASUREMENT, thread, r.rank)
                name = span.kernel or span.name
                yield _slice(_MEASUREMENT, threads[_MEASUREMENT, thread], name, span.kind, at + 1000 * span.begin,
                             1000 * span.nanoseconds, {"of": span.name} if span.kernel else {})  # fmt: skip


def _process(number: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}}


def _thread(threads: dict[tuple[int, str], int], process: int, name: str, at: int) -> Iterator[dict[str, Any]]:
    if (process, name) in threads:
        return
    number = threads[process, name] = 100_000 * process + 32 * at + sum(p == process for p, _ in threads) % 32 + 1
    while sum(n == number for n in threads.values()) > 1:
        number = threads[process, name] = number + 1
    yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slice(
    process: int, thread: int, name: str, category: str, begin: int, took: int, about: dict[str, str]
) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, "ts": begin / 1e6,
            "dur": took / 1e6, "args": about}  # fmt: skip

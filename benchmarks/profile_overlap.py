"""Profiles of steps on two GPUs against their planned timelines: what overlaps.

    python benchmarks/profile_overlap.py FOLDER/step_profile.json … > benchmarks/results/step_profile_2xh200.json

Summarises what `benchmarks/step_profile.py` wrote. Each case has step times, losses, and microseconds of the host by part.
It also has the following of the first rank, from one profiled step and from the timeline of the same layout:

parts    milliseconds of kernels, by the part of the step that launched them
wires    for each kind of collective: the number, the milliseconds, and the share of these that overlaps with compute.
         NCCL's kernels also wait for the other rank, so their time is longer than the transfer
idle_ms  milliseconds without compute

Each process group of a profile has its own stream, as in the timeline.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.readings.estimator import Estimator
from penteract.readings.time.timelines.timeline import timeline

KERNELS = {"attention": "cudnn", "loss": "chunked", "elementwise": "triton"}
GPUS = "2xH200"
Span = tuple[float, float]  # milliseconds
_KINDS = {
    "ReduceScatter": "reduce_scatter",
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "SendRecv": "messages",
}


def union(spans: Iterable[Span]) -> list[Span]:
    """The union of spans: in order, without overlaps."""
    out = list[Span]()
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def overlap(some: Sequence[Span], busy: Sequence[Span]) -> float:
    """How much of `some` is within `busy`, which is a union."""
    total, i = 0.0, 0
    for begin, end in sorted(some):
        while i and busy[min(i, len(busy) - 1)][1] > begin:
            i -= 1
        while i < len(busy) and busy[i][1] <= begin:
            i += 1
        k = i
        while k < len(busy) and busy[k][0] < end:
            total += min(end, busy[k][1]) - max(begin, busy[k][0])
            k += 1
    return total


def summary(compute: list[Span], wires: Mapping[str, list[Span]], parts: Mapping[str, float]) -> dict[str, Any]:
    """The fields `idle_ms`, `wires` and `parts`."""
    busy = union(compute)
    whole = max(end for _, end in busy) - min(begin for begin, _ in busy)
    return {
        "idle_ms": round(whole - sum(end - begin for begin, end in busy), 2),
        "wires": {
            kind: {"number": len(spans), "ms": round(sum(e - b for b, e in spans), 2),
                   "beside_compute": round(overlap(spans, busy) / sum(e - b for b, e in spans), 3)}
            for kind, spans in sorted(wires.items())
        },
        "parts": {name: round(ms, 2) for name, ms in sorted(parts.items(), key=lambda p: -p[1]) if ms >= 0.5},
    }  # fmt: skip


def measured(kernels: list[list[Any]]) -> dict[str, Any]:
    """The summary of a profiled step."""
    compute, wires, parts = list[Span](), defaultdict[str, list[Span]](list), defaultdict[str, float](float)
    for _, part, kernel, begin, took in kernels:
        span = begin / 1e3, (begin + took) / 1e3
        if "nccl" in kernel.lower():
            kind = next((name for key, name in _KINDS.items() if key in kernel), "other")
            wires[kind].append(span)
        else:
            compute.append(span)
            parts[part.partition(" (")[0]] += took / 1e3
    return summary(compute, wires, parts)


def planned(row: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of the planned timeline."""
    spec = replace(model(row["model"]), layers=row["layers"])
    layout = Layout(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()})
    line = timeline(Estimator(spec, cluster(row["gpus"]), row["sequence_length"]).steps, layout)
    compute, wires, parts = list[Span](), defaultdict[str, list[Span]](list), defaultdict[str, float](float)
    for e in line.of(0):
        if e.stream == "host":
            continue
        span, name = (e.start / 1e9, e.end / 1e9), e.name.partition(" (")[0]
        if e.stream == "compute" and not name.startswith(("wait", "finish")):
            compute.append(span)
            parts[name] += span[1] - span[0]
        elif name.startswith(("send", "recv", "start all_to_all")):  # NCCL uses the same kernel for these
            wires["messages"].append(span)
        elif e.stream not in ("compute", "waits beside compute"):
            wires[next((k for k in _KINDS.values() if k in name), name.removeprefix("start "))].append(span)
    return {"step_ms": round(line.picoseconds / 1e9, 2), **summary(compute, wires, parts)}


def make_record(paths: Sequence[Path]) -> dict[str, Any]:
    """The record of all cases in these files."""
    record, rows = dict[str, Any](), list[dict[str, Any]]()
    for path in paths:
        data = json.loads(path.read_text())
        record = record or {key: data[key] for key in ("commit", "date", "device", "torch", "nccl")}
        for name, case in data["cases"].items():
            bare = case["bare"]
            row: dict[str, Any] = {
                "case": name, "model": data["model"], "layers": data["layers"], "gpus": GPUS,
                "sequence_length": data["sequence_length"], "layout": {**data["layouts"][name], **KERNELS},
                "step_ms": round(mean(rank["median_ms"] for rank in bare), 2), "steps": len(bare[0]["step_ms"]),
                "spread_ms": [round(f(f(rank["step_ms"]) for rank in bare), 2) for f in (min, max)],
                "losses": [round(loss, 3) for loss in bare[0]["losses"]],
            }  # fmt: skip
            if "launch" in case:
                row["host_us"] = {part: round(times["median"], 1) for part, times in case["launch"][0].items()}
            if "profile" in case:
                row |= {"measured": measured(case["profile"][0]["kernels"]), "planned": planned(row)}
            rows.append(row)
    about = {"case": "steps of two GPUs, and one of each under a profiler beside its timeline",
             "command": "benchmarks/step_profile.py in two calls, summed up by benchmarks/profile_overlap.py"}  # fmt: skip
    return {**about, **record, "rows": rows}


if __name__ == "__main__":
    json.dump(make_record([Path(name) for name in sys.argv[1:]]), sys.stdout, indent=1)
    print()

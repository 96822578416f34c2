"""A profile of a step laid over its timeline: what runs beside what, on two GPUs and in the plan.

    python benchmarks/profile_overlap.py FOLDER/step_profile.json … > benchmarks/results/step_profile_2xh200.json

Sums up what `benchmarks/step_profile.py` wrote. Of each case: step times, losses, microseconds of the host by part; and
of the first rank, from one step under the profiler beside the timeline of the same layout:

parts    milliseconds of kernels by the part of the step that launched them, beside the planned
wires    of each kind of collective: how many, their milliseconds, and the share of them with compute beside it; NCCL's
         kernels also wait for the other rank, so theirs are longer than the wire is busy
idle_ms  how long no compute runs

A process group of the profile is a stream of its own, as in the timeline; kernels that launch nothing are left out.
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
from penteract.readings.time.timeline import timeline

USUAL = {"attention": "cudnn", "loss": "chunked", "elementwise": "triton"}
GPUS = "2xH200"
Span = tuple[float, float]  # milliseconds
_KINDS = {
    "ReduceScatter": "reduce_scatter",
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "SendRecv": "messages",
}


def union(spans: Iterable[Span]) -> list[Span]:
    """The same without overlaps, in order."""
    out = list[Span]()
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def shared(some: Sequence[Span], busy: Sequence[Span]) -> float:
    """Of `some`, what lies within `busy`, a union."""
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


def told(compute: list[Span], wires: Mapping[str, list[Span]], parts: Mapping[str, float]) -> dict[str, Any]:
    busy = union(compute)
    whole = max(end for _, end in busy) - min(begin for begin, _ in busy)
    return {
        "idle_ms": round(whole - sum(end - begin for begin, end in busy), 2),
        "wires": {
            kind: {"number": len(spans), "ms": round(sum(e - b for b, e in spans), 2),
                   "beside_compute": round(shared(spans, busy) / sum(e - b for b, e in spans), 3)}
            for kind, spans in sorted(wires.items())
        },
        "parts": {name: round(ms, 2) for name, ms in sorted(parts.items(), key=lambda p: -p[1]) if ms >= 0.5},
    }  # fmt: skip


def measured(kernels: list[list[Any]]) -> dict[str, Any]:
    compute, wires, parts = list[Span](), defaultdict[str, list[Span]](list), defaultdict[str, float](float)
    for _, part, kernel, begin, took in kernels:
        span = begin / 1e3, (begin + took) / 1e3
        if "nccl" in kernel.lower():
            kind = next((name for key, name in _KINDS.items() if key in kernel), "other")
            wires[kind].append(span)
        else:
            compute.append(span)
            parts[part.partition(" (")[0]] += took / 1e3
    return told(compute, wires, parts)


def planned(row: Mapping[str, Any]) -> dict[str, Any]:
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
        elif name.startswith(("send", "recv", "start all_to_all")):  # NCCL's kernel is the same for these
            wires["messages"].append(span)
        elif e.stream not in ("compute", "waits beside compute"):
            wires[next((k for k in _KINDS.values() if k in name), name.removeprefix("start "))].append(span)
    return {"step_ms": round(line.picoseconds / 1e9, 2), **told(compute, wires, parts)}


def summed_up(paths: Sequence[Path]) -> dict[str, Any]:
    record, rows = dict[str, Any](), list[dict[str, Any]]()
    for path in paths:
        data = json.loads(path.read_text())
        record = record or {key: data[key] for key in ("commit", "date", "device", "torch", "nccl")}
        for name, case in data["cases"].items():
            bare = case["bare"]
            row: dict[str, Any] = {
                "case": name, "model": data["model"], "layers": data["layers"], "gpus": GPUS,
                "sequence_length": data["sequence_length"], "layout": {**data["layouts"][name], **USUAL},
                "step_ms": round(mean(rank["median_ms"] for rank in bare), 2), "steps": len(bare[0]["step_ms"]),
                "spread_ms": [round(f(f(rank["step_ms"]) for rank in bare), 2) for f in (min, max)],
                "losses": [round(loss, 3) for loss in bare[0]["losses"]],
            }  # fmt: skip
            if "launch" in case:
                row["host_us"] = {part: round(told["median"], 1) for part, told in case["launch"][0].items()}
            if "profile" in case:
                row |= {"measured": measured(case["profile"][0]["kernels"]), "planned": planned(row)}
            rows.append(row)
    about = {"case": "steps of two GPUs, and one of each under a profiler beside its timeline",
             "command": "benchmarks/step_profile.py in two calls, summed up by benchmarks/profile_overlap.py"}  # fmt: skip
    return {**about, **record, "rows": rows}


if __name__ == "__main__":
    json.dump(summed_up([Path(name) for name in sys.argv[1:]]), sys.stdout, indent=1)
    print()

"""What is planned for every timed record, beside what was measured: the table by which the clock is judged.

    python benchmarks/planned_times.py playbook_sweep_h100.csv > planned.json
    python benchmarks/planned_times.py playbook_sweep_h100.csv --before planned.json > benchmarks/results/planned_times.json

Each group is one record of this folder, or of what others measured; a row is one layout. `error` is planned over
measured, less 1; of a group its median size. With `--before`, what another commit planned stands beside. The memory
planned for a row of our own is compared with the record's, to the byte. It takes half a minute, on any machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fused_kernels import fused, theirs
from peers_h200 import ROWS
from playbook_sweep import LENGTH, MODELS, layout_of
from provenance import provenance

from penteract import plan
from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.run import Optimizer, Precision
from penteract.readings.estimator import Estimator
from penteract.units import gib

RESULTS = Path(__file__).parent / "results"
OPTIONS = ("memory_options_8b_2xh200", "memory_options_8b_4xh200", "memory_options_70b_4xh200")
_PRECISION = {"dtype", "moments", "reduce", "fp8_gather"}

Row = tuple[str, float, float, bool | None]  # name, milliseconds planned and measured, whether the memory is the same


def options(name: str) -> Iterator[Row]:
    """Each option of memory, against its base."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    world = int(record["gpus"].split("x")[0])
    for row in record["rows"]:
        said: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()}
        precision = Precision(**{"dtype": "bf16", **{k: v for k, v in said.items() if k in _PRECISION}})
        optimizer = Optimizer(**{k: v for k, v in said.items() if k == "kind"})
        fields = {k: v for k, v in said.items() if k not in {*_PRECISION, "kind"}}
        dp = world // fields.get("tp", 1)
        steps = {"gradient_accumulation_steps": record["sequences_a_step"] // dp}
        estimator = Estimator(model(record["model"]), cluster(record["gpus"]), record["sequence_length"],
                        precision=precision.policy, optimizer_kinds=optimizer.optimizer_kinds)  # fmt: skip
        kernels = ("triton", "reference") if "elementwise" not in fields else (fields.pop("elementwise"),)
        found = list[tuple[float, bool]]()
        for kernel in kernels:  # older rows ran without kernels of our own: their memory tells
            lay = Layout(**{"dp": dp, "zero": 1, "attention": "cudnn", "loss": "chunked", **steps, **fields},
                         elementwise=kernel)  # fmt: skip
            estimate = estimator.estimate(lay)
            found.append(
                (estimator.time(estimate).seconds, gib(estimate.allocated) == max(row["predicted"]["allocated_gib"]))
            )
        seconds, same = next((one for one in found if one[1]), found[0])
        yield row["case"], 1e3 * seconds, row["median_ms"], same


def planned() -> Iterator[Row]:
    """Layouts that were planned, and trained: some before a loss in chunks and kernels of our own were usual."""
    record = json.loads((RESULTS / "planned_steps_4xh200.json").read_text())
    for row in record["rows"]:
        for usual in ("", ",loss=reference", ",elementwise=reference", ",loss=reference,elementwise=reference"):
            best = plan(record["model"], record["gpus"], sequence_length=record["sequence_length"],
                        batch=record["batch"], layout=f"{row['layout']},attention={row['attention']}{usual}").best  # fmt: skip
            same = max(map(gib, best.estimate.by_stage)) == max(row["predicted"]["allocated_gib"])
            if same:
                break
        yield row["layout"], 1e3 * best.time.seconds, row["measured"]["step_ms"], same


def profiled() -> Iterator[Row]:
    """Steps of two GPUs whose profile is laid over the timeline."""
    path = RESULTS / "step_profile_2xh200.json"
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        yield row["case"], *_of(row), None


def _of(row: Mapping[str, Any]) -> tuple[float, float]:
    spec = replace(model(row["model"]), layers=row["layers"])
    estimator = Estimator(spec, cluster(row["gpus"]), row["sequence_length"])
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()}
    return 1e3 * estimator.time(estimator.estimate(Layout(**fields))).seconds, row["step_ms"]


def one_gpu() -> Iterator[Row]:
    """Steps of one GPU with each fused attention kernel; documents are packed where the kernel takes them."""
    record = json.loads((RESULTS / "flash_attention.json").read_text())
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        spec = replace(model(name), layers=record[name]["layers"])
        for case, row in record[name].items():
            if case not in ("flash", "cudnn, whole sequences"):
                continue
            estimator = Estimator(spec, cluster("1xH200"), row["sequence_length"])
            seconds = estimator.time(estimator.estimate(Layout(attention=row["attention"]))).seconds
            yield f"{name}, {spec.layers} layers, {row['attention']}", 1e3 * seconds, row["median_ms"], None


def peers() -> Iterator[Row]:
    """Another trainer, on one node, whose pointwise kernels are fused."""
    for name, spec, length, layout, measured, _ in ROWS:
        lay = replace(layout, zero=1, attention="cudnn")
        estimator = Estimator(spec, theirs(cluster("8xH200")), sequence_length=length)
        tokens = lay.global_batch_size * length / lay.world
        with fused():
            seconds = estimator.time(estimator.estimate(lay)).seconds
        yield name, 1e3 * seconds, 1e3 * tokens / measured, None


def sweep(path: Path) -> Iterator[Row]:
    """What the Ultra-Scale Playbook's authors measured on 8 to 128 H100s, with fused pointwise kernels."""
    known = dict[tuple[str, int], Estimator]()
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] != "completed" or row["gbs_sequences"] != "256":
                continue
            key = row["model_params_B"], int(row["nodes"])
            if key not in known:
                nodes = theirs(cluster(f"{key[1]}x8xH100", fabric="efa"))
                known[key] = Estimator(MODELS[key[0]], nodes, sequence_length=LENGTH)
            lay = layout_of(row)
            tokens = lay.global_batch_size * LENGTH / lay.world
            with fused():
                seconds = known[key].time(known[key].estimate(lay)).seconds
            name = "/".join([*key[:1], row["nodes"], *(f"{k}{row[k]}" for k in ("dp", "tp", "pp")),
                             f"z{row['zero_stage']}", f"mbs{row['micro_batch_size']}"])  # fmt: skip
            yield name, 1e3 * seconds, 1e3 * tokens / float(row["tokens_per_s_per_gpu"]), None


def told(rows: Iterator[Row], before: Mapping[str, Any]) -> dict[str, Any]:
    """A group."""
    old = {row["row"]: row["planned_ms"] for row in before.get("rows", ())}
    out = list[dict[str, Any]]()
    for name, milliseconds, measured, same in rows:
        row: dict[str, Any] = {"row": name, "measured_ms": round(measured, 2), "planned_ms": round(milliseconds, 2),
                               "error": round(milliseconds / measured - 1, 3)}  # fmt: skip
        if name in old:
            row |= {"before_ms": old[name], "before_error": round(old[name] / measured - 1, 3)}
        out.append(row | ({} if same is None else {"memory_as_recorded": same}))
    summary = {"median_error": round(statistics.median(abs(row["error"]) for row in out), 4)}
    if all("before_error" in row for row in out):
        summary["median_error_before"] = round(statistics.median(abs(row["before_error"]) for row in out), 4)
    return summary | {"rows": out}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--before", type=Path)
    asked = parser.parse_args()
    before = json.loads(asked.before.read_text())["groups"] if asked.before else {}
    groups = {"planned_steps_4xh200": planned(), **{name: options(name) for name in OPTIONS},
              "step_profile_2xh200": profiled(), "flash_attention": one_gpu(), "peers_h200": peers(), "playbook_sweep": sweep(asked.sweep)}  # fmt: skip
    record = {**provenance(" ".join(["python benchmarks/planned_times.py", asked.sweep.name])),
              "groups": {name: told(rows, before.get(name, {})) for name, rows in groups.items()}}  # fmt: skip
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

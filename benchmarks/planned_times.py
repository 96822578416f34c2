"""Planned times of all recorded steps against the measured ones. This is how the accuracy of planned times is judged.

    python benchmarks/planned_times.py playbook_sweep_h100.csv > planned.json
    python benchmarks/planned_times.py playbook_sweep_h100.csv --before planned.json > benchmarks/results/planned_times.json

Each group is a record of ours or measurements of others. A row is one layout. The `error` of a row is planned over measured
time, less 1; that of a group is the median of the absolute errors. All of these steps were measured one by one, each outcome
read before the next step, so they are planned so (`at_once`). With `--before`, rows also have the times planned by
another commit. The planned memory of our own rows is compared with the record, to the byte. It takes half a minute and needs
no GPU.
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

from peers_h200 import ROWS
from playbook_sweep import LENGTH, MODELS, layout_of
from provenance import provenance

from penteract import plan
from penteract.config.catalog import model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Optimizer, Precision
from penteract.measure.report.one_kernel_ops import fused, with_other_host
from penteract.readings.estimator import Estimator
from penteract.units import gib

RESULTS = Path(__file__).parent / "results"
OPTIONS = ("memory_options_8b_2xh200", "memory_options_8b_4xh200", "memory_options_70b_4xh200")
WHOLE = replace(RECIPES["bf16"], master="fp32")  # all rows were trained with master weights that are not split
_PRECISION = {"dtype", "moments", "reduce", "fp8_gather"}

Row = tuple[str, float, float, bool | None]  # name, milliseconds planned and measured, whether the memory is the same


def options(name: str) -> Iterator[Row]:
    """Rows of a record of `memory_options.py`."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    world = int(record["gpus"].split("x")[0])
    for row in record["rows"]:
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()}
        master = "fp32" if RECIPES[options.get("dtype", "bf16")].master else "auto"
        parts = {k: v for k, v in options.items() if k in _PRECISION}
        precision = Precision(**{"dtype": "bf16", "master": master, **parts})
        optimizer = Optimizer(**{k: v for k, v in options.items() if k == "kind"})
        fields = {k: v for k, v in options.items() if k not in {*_PRECISION, "kind"}}
        dp = world // fields.get("tp", 1)
        steps = {"gradient_accumulation_steps": record["sequences_a_step"] // dp}
        estimator = Estimator(model(record["model"]), cluster(record["gpus"]), record["sequence_length"],
                        precision=precision.policy, optimizer_kinds=optimizer.optimizer_kinds, at_once=True)  # fmt: skip
        kernels = ("triton", "reference") if "elementwise" not in fields else (fields.pop("elementwise"),)
        found = list[tuple[float, bool]]()
        for kernel in kernels:  # older rows ran without Triton kernels, which their memory shows
            lay = Layout(**{"dp": dp, "zero": 1, "attention": "cudnn", "loss": "chunked", **steps, **fields},
                         elementwise=kernel)  # fmt: skip
            estimate = estimator.estimate(lay)
            found.append(
                (estimator.time(estimate).seconds, gib(estimate.allocated) == max(row["predicted"]["allocated_gib"]))
            )
        seconds, same = next((one for one in found if one[1]), found[0])
        yield row["case"], 1e3 * seconds, row["median_ms"], same


def planned() -> Iterator[Row]:
    """Rows of `planned_steps.py`. Some are older than the defaults of a chunked loss and of Triton kernels."""
    record = json.loads((RESULTS / "planned_steps_4xh200.json").read_text())
    for row in record["rows"]:
        for defaults in ("", ",loss=reference", ",elementwise=reference", ",loss=reference,elementwise=reference"):
            best = plan(record["model"], record["gpus"], sequence_length=record["sequence_length"],
                        batch=record["batch"], precision=WHOLE,
                        layout=f"{row['layout']},attention={row['attention']},collectives=library{defaults}").best  # fmt: skip
            same = max(map(gib, best.estimate.by_pp_rank)) == max(row["predicted"]["allocated_gib"])
            if same:
                break
        estimator = Estimator(model(record["model"]), cluster(record["gpus"]), record["sequence_length"], precision=WHOLE,
                              at_once=True)  # fmt: skip
        seconds = estimator.time(estimator.estimate(best.layout)).seconds
        yield row["layout"], 1e3 * seconds, row["measured"]["step_ms"], same


def profiled() -> Iterator[Row]:
    """Steps on two GPUs that were also profiled."""
    path = RESULTS / "step_profile_2xh200.json"
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        yield row["case"], *_times(row), None


def _times(row: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds planned and measured of a profiled row."""
    spec = replace(model(row["model"]), layers=row["layers"])
    estimator = Estimator(spec, cluster(row["gpus"]), row["sequence_length"], precision=WHOLE, at_once=True)
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()}
    return 1e3 * estimator.time(estimator.estimate(Layout(**fields))).seconds, row["step_ms"]


def one_gpu() -> Iterator[Row]:
    """Steps on one GPU with each fused attention kernel. Documents are packed if the kernel supports it."""
    record = json.loads((RESULTS / "flash_attention.json").read_text())
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        spec = replace(model(name), layers=record[name]["layers"])
        for case, row in record[name].items():
            if case not in ("flash", "cudnn, whole sequences"):
                continue
            estimator = Estimator(spec, cluster("1xH200"), row["sequence_length"], precision=WHOLE, at_once=True)
            seconds = estimator.time(estimator.estimate(Layout(attention=row["attention"]))).seconds
            yield f"{name}, {spec.layers} layers, {row['attention']}", 1e3 * seconds, row["median_ms"], None


def peers() -> Iterator[Row]:
    """Megatron-LM on one node, whose pointwise kernels are fused."""
    for name, spec, length, layout, measured, _ in ROWS:
        lay = replace(layout, zero=1, attention="cudnn")
        estimator = Estimator(spec, with_other_host(cluster("8xH200")), sequence_length=length, precision=WHOLE,
                              at_once=True)  # fmt: skip
        tokens = lay.global_batch_size * length / lay.world
        with fused():
            seconds = estimator.time(estimator.estimate(lay)).seconds
        yield name, 1e3 * seconds, 1e3 * tokens / measured, None


def sweep(path: Path) -> Iterator[Row]:
    """The sweep of the Ultra-Scale Playbook on 8 to 128 H100s, with fused pointwise kernels."""
    estimators = dict[tuple[str, int], Estimator]()
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] != "completed" or row["gbs_sequences"] != "256":
                continue
            key = row["model_params_B"], int(row["nodes"])
            if key not in estimators:
                nodes = with_other_host(cluster(f"{key[1]}x8xH100", fabric="efa"))
                estimators[key] = Estimator(MODELS[key[0]], nodes, sequence_length=LENGTH, precision=WHOLE,
                                            at_once=True)  # fmt: skip
            lay = layout_of(row)
            tokens = lay.global_batch_size * LENGTH / lay.world
            with fused():
                seconds = estimators[key].time(estimators[key].estimate(lay)).seconds
            name = "/".join([*key[:1], row["nodes"], *(f"{k}{row[k]}" for k in ("dp", "tp", "pp")),
                             f"z{row['zero_stage']}", f"mbs{row['micro_batch_size']}"])  # fmt: skip
            yield name, 1e3 * seconds, 1e3 * tokens / float(row["tokens_per_s_per_gpu"]), None


def group_record(rows: Iterator[Row], before: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a group. `before`: the same group of another commit."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the CSV file of the sweep")
    parser.add_argument("--before", type=Path, help="the record of another commit")
    args = parser.parse_args()
    before = json.loads(args.before.read_text())["groups"] if args.before else {}
    groups = {"planned_steps_4xh200": planned(), **{name: options(name) for name in OPTIONS},
              "step_profile_2xh200": profiled(), "flash_attention": one_gpu(), "peers_h200": peers(), "playbook_sweep": sweep(args.sweep)}  # fmt: skip
    record = {**provenance(" ".join(["python benchmarks/planned_times.py", args.sweep.name])),
              "groups": {name: group_record(rows, before.get(name, {})) for name, rows in groups.items()}}  # fmt: skip
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

"""Rows of our own records in benchmarks/results, planned again today.

Each record names its model, its GPUs and the layout of every row. What it does not name has been a default when it was
made. Where defaults changed between the rows of a record, the memory that was predicted then tells which they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any, cast

from penteract.config.catalog import model
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import Optimizer, Precision
from penteract.errors import BadInput
from penteract.measure.report.accuracy_row import AccuracyRow, Amounts
from penteract.measure.report.measured_routing import AS_ROUTED, as_routed
from penteract.readings.estimator import Estimator
from penteract.readings.memory.process_memory import process_memory
from penteract.units import GIB

Record = Mapping[str, Any]
ClusterOf = Callable[[str], Cluster]

_WHOLE = replace(RECIPES["bf16"], master="fp32")  # before bf16 recipes split their master weights
_PRECISION = {"dtype", "moments", "reduce", "fp8_gather"}
_LONG_NAMES = {"mbs": "micro_batch_size"}  # short names of layouts in text
_OLDER: tuple[Mapping[str, str], ...] = (
    {}, {"loss": "reference"}, {"elementwise": "reference"}, {"loss": "reference", "elementwise": "reference"}
)  # fmt: skip

# What a case beside torchtitan trains: model, changes, tokens of a sequence, recipe.
_BESIDE: Mapping[str, tuple[str, Mapping[str, Any], int, str]] = {
    "A1": ("llama-3.1-8b", {"layers": 8}, 8192, "bf16"),
    "A1_fp8": ("llama-3.1-8b", {"layers": 8}, 8192, "fp8_tensorwise"),
    "A1_fp8_fast": ("llama-3.1-8b", {"layers": 8}, 8192, "fp8_tensorwise"),  # how products sum is in no price
    "B1": ("llama-3.2-1b", {"tied": False}, 4096, "bf16"),
    "E1": ("llama-3.2-1b", {"tied": False}, 32_768, "bf16"),
    "F1": ("qwen3-30b-a3b", {"layers": 4}, 4096, "bf16"),
    "A2": ("llama-3.1-8b", {}, 8192, "bf16"),
    "tp2": ("llama-3.1-8b", {}, 8192, "bf16"),
    "pp2": ("llama-3.1-8b", {}, 8192, "bf16"),
    "A4": ("llama-3.1-8b", {}, 8192, "bf16"),
    "A4_fp8": ("llama-3.1-8b", {}, 8192, "fp8_tensorwise"),
    "C4": ("llama-3.1-8b", {}, 8192, "bf16"),
    "D4": ("llama-3.1-8b", {}, 8192, "bf16"),
    "E4": ("llama-3.1-8b", {}, 131_072, "bf16"),
    "F4": ("qwen3-30b-a3b", {"layers": 16}, 4096, "bf16"),
}


@dataclass(frozen=True, slots=True)
class Replanner:
    """Plans rows again. Estimators are kept: rows of a record share most of their work. `cluster_of`: by its name."""

    cluster_of: ClusterOf = cluster
    estimators: dict[tuple[ModelSpec, str, int, Policy, OptimizerKinds, bool], Estimator] = field(
        default_factory=dict[tuple[ModelSpec, str, int, Policy, OptimizerKinds, bool], Estimator]
    )

    def estimator(
        self, spec: ModelSpec, gpus: str, length: int, policy: Policy, kinds: OptimizerKinds | None = None, *,
        at_once: bool = True,
    ) -> Estimator:  # fmt: skip
        """The estimator of a model on a cluster. `at_once`: the steps were called one by one, each outcome read before
        the next, which training does not do."""
        kinds = kinds or Optimizer().optimizer_kinds
        key = spec, gpus, length, policy, kinds, at_once
        if key not in self.estimators:
            self.estimators[key] = Estimator(spec, self.cluster_of(gpus), length, policy, kinds, at_once)
        return self.estimators[key]

    def match(self, estimator: Estimator, layouts: list[Layout], allocated_gib: float) -> tuple[Amounts, bool]:
        """Of layouts that differ in defaults: the one with the memory that was predicted then, else the first; and
        whether it has that memory."""
        each = [Amounts.of(estimator, lay) for lay in layouts]
        same = [one for one in each if _same(one, allocated_gib)]
        return (same or each)[0], bool(same)


def own_rows(results: Path, cluster_of: ClusterOf = cluster) -> Iterator[AccuracyRow]:
    """All rows of the records that are there, planned again. Raises BadInput for a record that cannot be read."""
    planner = Replanner(cluster_of)
    for name, read in READERS.items():
        path = results / f"{name}.json"
        if path.is_file():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                yield from read(planner, name, record)
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput("RECORD", "not a record of this kind", where=str(path),
                               found=f"{type(error).__name__}: {error}"[:120]) from None  # fmt: skip


def _same(predicted: Amounts, allocated_gib: float) -> bool:
    """Whether the memory is that which was predicted when the row was measured: the program is the same."""
    return predicted.allocated is not None and isclose(predicted.allocated, allocated_gib, rel_tol=1e-6)


def _layout(options: Mapping[str, Any]) -> Layout:
    fields: dict[str, Any] = {k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in options.items()}
    return Layout(**fields)


def _largest(measured: Record, step: float | None) -> Amounts:
    """Of a rank's memory, the fullest rank's."""
    most: dict[str, Any] = {key: max(measured[f"{key}_gib"]) for key in ("allocated", "reserved", "device")}
    return Amounts(**most, step=step)


def _memory_options(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """Options of memory on a few GPUs. Times count where the losses fell: one record says that its own are void."""
    world = int(record["gpus"].split("x")[0])
    for row in record["rows"]:
        options: dict[str, Any] = dict(row["layout"])
        parts: dict[str, Any] = {"dtype": "bf16", "master": "fp32"}
        parts |= {k: v for k, v in options.items() if k in _PRECISION}
        if not RECIPES[parts["dtype"]].master:
            parts["master"] = "auto"
        precision = Precision(**parts)
        optimizer = Optimizer(**{k: v for k, v in options.items() if k == "kind"})
        fields = {k: v for k, v in options.items() if k not in {*_PRECISION, "kind"}}
        dp = world // fields.get("tp", 1)
        fields = {"dp": dp, "zero": 1, "attention": "cudnn", "loss": "chunked", "elementwise": "triton",
                  "gradient_accumulation_steps": record["sequences_a_step"] // dp, **fields}  # fmt: skip
        estimator = planner.estimator(
            model(record["model"]),
            record["gpus"],
            record["sequence_length"],
            precision.policy,
            optimizer.optimizer_kinds,
        )
        older = [] if "elementwise" in row["layout"] else [_layout({**fields, "elementwise": "reference"})]
        then = max(row["predicted"]["allocated_gib"])
        predicted, same = planner.match(estimator, [_layout(fields), *older], then)
        yield AccuracyRow(
            group=group, name=row["case"], predicted=predicted, same_program=same,
            measured=_largest(row["measured"], row["median_ms"] if row["falls"] else None),
        )  # fmt: skip


def _planned_steps(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """Layouts in every dimension on four GPUs; the batch is of sequences."""
    sequences = int(record["batch"].removesuffix("seqs"))
    estimator = planner.estimator(model(record["model"]), record["gpus"], record["sequence_length"], _WHOLE)
    for row in record["rows"]:
        words: dict[str, str] = {key: value for key, _, value in (w.partition("=") for w in row["layout"].split(","))}
        settings: dict[str, Any] = {_LONG_NAMES.get(k, k): int(v) if v.isdecimal() else v for k, v in words.items()}
        if settings.get("recompute") == "full":
            settings["recompute"] = ("*",)
        each = settings.get("dp", 1) * settings.get("micro_batch_size", 1)
        settings |= {"gradient_accumulation_steps": sequences // each, "attention": row["attention"]}
        usual = {"loss": "chunked", "elementwise": "triton"}
        layouts = [_layout({**settings, **usual, **older}) for older in _OLDER]
        then = max(row["predicted"]["allocated_gib"])
        predicted, same = planner.match(estimator, layouts, then)
        yield AccuracyRow(
            group=group, name=row["layout"], predicted=predicted, same_program=same,
            measured=_largest(row["measured"], row["measured"]["step_ms"]),
        )  # fmt: skip


def _profiled(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """Steps of two GPUs, whose times alone were kept: they are older than the kernels that make a step faster now."""
    for row in record["rows"]:
        spec = replace(model(row["model"]), layers=row["layers"])
        estimator = planner.estimator(spec, row["gpus"], row["sequence_length"], _WHOLE)
        yield AccuracyRow(group=group, name=row["case"], predicted=Amounts.of(estimator, _layout(row["layout"])),
                          measured=Amounts(step=row["step_ms"]), same_program=False)  # fmt: skip


def _attention(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """Steps of one GPU with a fused attention; documents are packed where the kernel can."""
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        spec = replace(model(name), layers=record[name]["layers"])
        for case in ("flash", "cudnn, whole sequences"):
            row = record[name][case]
            estimator = planner.estimator(spec, "1xH200", row["sequence_length"], _WHOLE)
            measured = Amounts(allocated=row["peak_allocated_gib"], step=row["median_ms"])
            predicted = Amounts.of(estimator, Layout(attention=row["attention"]))
            yield AccuracyRow(
                group=group,
                name=f"{name}, {spec.layers} layers, {case}",
                predicted=predicted,
                measured=measured,
                same_program=_same(predicted, row["priced_gib"]),
            )


def _beside(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """The runs of ours that were timed beside another trainer's, each with the gradient's dtype that it had."""
    for row in record["rows"]:
        name, changes, length, recipe = _BESIDE[row["case"]]
        spec = replace(model(name), **changes)
        if spec.moe is not None:  # torchtitan's have no balance
            spec = replace(spec, moe=replace(spec.moe, balance="none"))
        ran = row["our_runs"][-1]
        precision = Precision(dtype=recipe, gradient=ran["gradient"])  # pyright: ignore[reportArgumentType] - of a record
        layout = _layout(ran["layout"])
        gpu = next(name for name in ("H200", "H100") if name in ran["device"])
        estimator = planner.estimator(spec, f"{layout.world}x{gpu}", length, precision.policy, at_once=False)
        predicted = Amounts.of(estimator, layout)
        yield AccuracyRow(
            group=group, name=row["case"], predicted=predicted, same_program=_same(predicted, ran["planned_gib"]),
            measured=Amounts(allocated=ran["allocated_gib"], reserved=ran["reserved_gib"], step=row["median_ms"]),
        )  # fmt: skip


# What rows have that do not say it: there was no other method.
_SENT = "parallel.ep_method=all_to_all"


def _swept(planner: Replanner, group: str, record: Record) -> Iterator[AccuracyRow]:
    """The cases of a sweep, each with the settings of its run, in a process of its own: so its memory is known too."""
    for row in record["rows"]:
        settings = [_SENT, *row["settings"]]
        run = resolve(None, record["preset"], settings, planner.cluster_of(record["gpus"]).gpus).run
        kinds, policy = run.optimizer.optimizer_kinds, run.precision.policy
        estimator = planner.estimator(run.model, record["gpus"], run.sequence_length, policy, kinds, at_once=False)
        # Before, no set of ops named the result that the fusion "glu" stores: "swiglu" changed nothing there.
        older = replace(run.layout, recompute=tuple(name for name in run.layout.recompute if name != "swiglu"))
        if older != run.layout and _same(Amounts.of(estimator, older), row["planned_gib"]):
            run = replace(run, layout=older)
        predicted = Amounts.of(estimator, run.layout)
        if (process := process_memory(estimator, estimator.estimate(run.layout))) is not None:
            predicted = replace(predicted, reserved=process.reserved / GIB, device=process.device / GIB)
        sizes = {key: row[f"{key}_gib"] for key in ("allocated", "reserved", "device")}
        yield AccuracyRow(
            group=group, name=row["name"], predicted=predicted, same_program=_same(predicted, row["planned_gib"]),
            measured=Amounts(**sizes, step=row["median_ms"]),
        )  # fmt: skip
        if routed := row.get("routed"):
            predicted = as_routed(estimator, run, routed["rank"], routed["rows"], row["imbalance"])
            yield AccuracyRow(
                group=group, name=row["name"] + AS_ROUTED, predicted=predicted,
                measured=Amounts(allocated=row["allocated_gib"], step=row["median_ms"]),
            )  # fmt: skip


READERS: Mapping[str, Callable[[Replanner, str, Record], Iterator[AccuracyRow]]] = {
    "planned_steps_4xh200": _planned_steps,
    "memory_options_8b_2xh200": _memory_options,
    "memory_options_8b_4xh200": _memory_options,
    "memory_options_70b_4xh200": _memory_options,
    "step_profile_2xh200": _profiled,
    "flash_attention": _attention,
    "beside_torchtitan": _beside,
    "beside_torchtitan_h100": _beside,
    "beside_torchtitan_two": _beside,
    "beside_torchtitan_four": _beside,
    "bench_one_card_h200": _swept,
    "bench_one_card_again_h200": _swept,
    "bench_one_card_options_h200": _swept,
    "bench_two_cards_h200": _swept,
    "bench_four_cards_h200": _swept,
    "bench_plan_8b_4xh200": _swept,
    "bench_plan_30b_4xh200": _swept,
    "bench_plan_30b_again_4xh200": _swept,
    "bench_two_experts_h200": _swept,
    "bench_two_experts_again_h200": _swept,
    "bench_gathered_tokens_h200": _swept,
    "bench_padded_rows_h200": _swept,
    "bench_blocks_h200": _swept,
}

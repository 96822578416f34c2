"""Measurements that others have published, in a folder that the reader names. Of these the report keeps errors alone.

Only sets whose trainer, model and cluster the planner can stand for are read. Memory is not compared: another trainer
keeps other tensors. Nothing is fitted to these rows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.errors import BadInput
from penteract.measure.report.one_kernel_ops import fused, with_other_host
from penteract.measure.results.residual import ErrorSummary
from penteract.readings.estimator import Estimator

# The models of the Ultra-Scale Playbook's sweep, by billions of parameters.
PLAYBOOK_MODELS = {
    "1.34": ModelSpec(name="1.34B", layers=16, hidden_size=2048, heads=32, kv_heads=32, head_size=64, ffn_size=8192,
                      vocab_size=131_072, tied=True),
    "8.86": ModelSpec(name="8.86B", layers=32, hidden_size=4096, heads=32, kv_heads=32, head_size=128,
                      ffn_size=14_336, vocab_size=131_072),
}  # fmt: skip
PLAYBOOK_LENGTH = 4096


def playbook_layout(row: Mapping[str, str]) -> Layout:
    """The layout of a row of the Playbook's sweep."""
    n: dict[str, Any] = {name: int(row[name]) for name in ("dp", "tp", "pp")}
    return Layout(
        **n, zero=int(row["zero_stage"]), micro_batch_size=int(row["micro_batch_size"]),
        gradient_accumulation_steps=int(row["grad_acc_steps"]), attention="flash",
    )  # fmt: skip


def _playbook(path: Path) -> Iterator[float]:
    """Errors of the step times of 8 to 128 H100s: runs that completed, of 256 sequences a step."""
    estimators = dict[tuple[str, int], Estimator]()
    whole = replace(RECIPES["bf16"], master="fp32")  # not split
    with path.open(encoding="utf-8", newline="") as file, fused():
        for row in csv.DictReader(file):
            if row["status"] != "completed" or row["gbs_sequences"] != "256":
                continue
            key = row["model_params_B"], int(row["nodes"])
            if key not in estimators:
                nodes = with_other_host(cluster(f"{key[1]}x8xH100", fabric="efa"))
                estimators[key] = Estimator(PLAYBOOK_MODELS[key[0]], nodes, PLAYBOOK_LENGTH, whole, at_once=True)
            lay = playbook_layout(row)
            seconds = estimators[key].time(estimators[key].estimate(lay)).seconds
            measured = lay.global_batch_size * PLAYBOOK_LENGTH / lay.world / float(row["tokens_per_s_per_gpu"])
            yield seconds / measured - 1


READERS: Mapping[str, tuple[str, Callable[[Path], Iterator[float]]]] = {
    "playbook_sweep_h100.csv": ("The Ultra-Scale Playbook's sweep, nanotron on 8 to 128 H100s", _playbook),
}


def published_errors(folder: Path) -> dict[str, ErrorSummary]:
    """What a set is -> the errors of its step times. Raises BadInput where the folder has none of the sets."""
    found: dict[str, ErrorSummary] = {}
    for name, (about, read) in READERS.items():
        path = folder / name
        if path.is_file():
            try:
                summary = ErrorSummary.of(read(path))
            except (KeyError, ValueError) as error:
                raise BadInput("DATA", "not the table that its name says", where=str(path),
                               found=f"{type(error).__name__}: {error}"[:120]) from None  # fmt: skip
            if summary is not None:
                found[about] = summary
    if not found:
        raise BadInput(
            "DATA", "no published set that is known", where=f"--published {folder}", allowed=", ".join(READERS)
        )
    return found

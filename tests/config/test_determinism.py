"""What has the same bits by default was run: `same_bits.py` runs it, and its record has how it ended."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.config.rules.determinism import ONE_RANK, TWO_RANKS, not_seen_to_repeat, was_repeated
from penteract.config.run import RunSpec

ROOT = Path(__file__).parents[2]
H200 = "NVIDIA H200"


def ended() -> dict[str, Any]:
    """How bitwise runs ended, by name."""
    found = json.loads((ROOT / "benchmarks/results/same_bits_h200.json").read_text(encoding="utf-8"))
    runs = found["kills"] | found["ranks"]
    return {name.removesuffix(", bitwise"): run for name, run in runs.items() if name.endswith(", bitwise")}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks/same_bits.py`."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("same_bits")


def run_of(*words: str, attention: str = "fa4_documents") -> RunSpec:
    """A run with a GPU's kernels."""
    kernels = (f"--kernels.attention={attention}", "--kernels.elementwise=triton", "--precision.dtype=bf16")
    return resolve(None, "tiny", [*kernels, *words]).run


def test_what_is_bitwise_by_default_ended_with_the_same_bits() -> None:
    runs = ended()
    assert TWO_RANKS in runs
    assert all(run["bitwise"] and run["last_checkpoint_equal"] for run in runs.values())
    in_fp8 = {"tensorwise": "FP8", "rowwise": "FP8, a scale a row"}
    assert {*ONE_RANK} <= in_fp8.keys() and {in_fp8[kind] for kind in ONE_RANK} <= runs.keys()


def test_the_layout_of_two_ranks_is_that_of_its_run(benchmark: Any) -> None:
    run = run_of(*benchmark._SMALL, *benchmark.RANKS[TWO_RANKS], "--kernels.determinism=bitwise")
    assert not [*not_seen_to_repeat(run.model, run.layout, (9, 0))]
    assert was_repeated(run, H200, 2) and not was_repeated(run, H200, 1)  # on two hosts each has one


def test_all_runs_that_are_killed_are_legal(benchmark: Any) -> None:
    for name, words in (benchmark.KILLED | benchmark.RANKS).items():
        ring = "--parallel.cp_method=ring" in words  # which no kernel of a package takes
        attention = "reference" if ring or "--kernels.attention=reference" in words else "fa4_documents"
        run = run_of(*benchmark._SMALL, *words, "--kernels.determinism=bitwise", attention=attention)
        assert run.layout.determinism == "bitwise" and run.layout.world == (2 if name in benchmark.RANKS else 1), name


@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer.kind=muon",), ("--precision.dtype=fp8_rowwise",), ("--precision.gradient=bf16",),
        ("--parallel.dp=2",), ("--kernels.collectives=library",), ("--precision.dtype=fp8_tensorwise",),
        ("--parallel.tp=1", "--parallel.cp=2", "--kernels.collectives=library"),
        ("--parallel.tp=1", "--parallel.pp=2", "--kernels.collectives=library"),
        ("--parallel.tp=1", "--parallel.dp=2", "--parallel.zero=3", "--kernels.collectives=library"),
        ("--model.moe.experts=4", "--model.moe.top_k=2", "--model.moe.ffn_size=96"),
    ],
    ids=str,
)  # fmt: skip
def test_other_runs_on_two_ranks_are_not_bitwise_by_default(words: tuple[str, ...]) -> None:
    overlapped = ("--parallel.tp=2", "--kernels.collectives=overlapped")
    assert was_repeated(run_of(*overlapped), H200, 2) and not was_repeated(run_of(*overlapped), "NVIDIA H200 NVL", 2)
    assert not was_repeated(run_of(*overlapped, *words), H200, 4)


def test_one_rank_repeats_with_kernels_that_add_in_order() -> None:
    run = run_of()
    assert was_repeated(run, H200, 1) and not was_repeated(run, "NVIDIA H100 80GB HBM3", 1)
    for kind, seen in (("tensorwise", True), ("rowwise", True), ("delayed", False)):
        assert was_repeated(run_of(f"--precision.dtype=fp8_{kind}"), H200, 1) is seen
    for layout in (Layout(attention="cudnn"), Layout()):
        assert not was_repeated(replace(run, layout=layout), H200, 1)

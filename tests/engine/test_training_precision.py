"""fp16 as a person trains it: overflows are skipped on all ranks and told; the scale survives a change of layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.test_training import train
from penteract.engine.session.outputs.metrics import read_metrics


def test_a_scale_that_is_too_large_is_halved_and_goes_on_where_it_was(tmp_path: Path) -> None:
    scale = 2.0**31
    words = ("--preset=tiny", "--precision.dtype=fp16", f"--precision.loss_scale={scale}")
    ran = train(tmp_path, *words, "--steps=3", "--parallel.dp=2", "--parallel.zero=1")
    assert ran["memory"]["measured_gib"] == pytest.approx(ran["memory"]["predicted_gib"], rel=0.02)
    train(tmp_path, f"--resume={ran['run_dir']}", "--steps=5", "--parallel.dp=1", "--parallel.tp=2")
    rows = read_metrics(Path(ran["run_dir"]) / "metrics.jsonl")
    assert [r["train/loss_scale"] for r in rows] == [scale / 2**n for n in range(5)]
    assert all(r["train/skipped"] is True and r["train/grad_norm"] is None for r in rows)
    assert all(isinstance(r["train/loss"], float) for r in rows)  # the forward passes did not overflow


def test_an_overflow_that_no_scale_avoids_ends_the_run(tmp_path: Path) -> None:
    words = ("--preset=tiny", "--precision.dtype=fp16", "--precision.loss_scale=2", "--model.initial_std=90")
    with pytest.raises(AssertionError, match="NUMERICS"):  # by its exit code, which is not 0
        train(tmp_path, *words, "--steps=9")
    assert len(read_metrics(tmp_path / "latest" / "metrics.jsonl")) == 1  # the scale was halved once

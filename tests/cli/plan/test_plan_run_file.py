"""The run file that `penteract plan --out` writes has what was chosen, and trains it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.plan.tiny_step import TINY_STEP, Tell
from penteract import plan
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY
from penteract.config.resolve.resolved_run import resolve
from penteract.planner.ask import parse_settings
from penteract.planner.plan import exact


def test_a_run_file_trains_the_layout(tell: Tell, tmp_path: Path) -> None:
    told = tell("plan", *TINY_STEP, "--layout", "tp=2,pp=2,recompute=full,mbs=2", "--out", "run.toml")
    assert told.code == 0
    assert (
        'Before training, edit run.toml: training.steps = 1000, data.source = "builtin" (Python\'s library) and '
        'tokenizer.source = "bytes" are placeholders. '
        "A checkpoint is saved every "
    ) in told.out and "(checkpoint.every), about half an hour as planned.\n" in told.out
    written = (tmp_path / "run.toml").read_text()
    assert written.startswith(
        "# A planned run: every value, and where it came from. Train it:\n#   penteract train run.toml\n"
    )
    run = resolve(tmp_path / "run.toml").run
    assert run.model == TINY
    step = plan(
        "tiny", "4xH200", sequence_length=256, batch="16seqs", layout="tp=2,pp=2,recompute=full,mbs=2"
    ).best.time
    assert run.checkpoint.every * step.seconds == pytest.approx(1800, rel=0.01)
    assert (run.layout.tp, run.layout.pp, run.layout.recompute, run.layout.micro_batch_size) == (2, 2, ("*",), 2)
    assert (run.sequence_length, run.layout.global_batch_size, run.precision.dtype) == (256, 16, "bf16")
    assert run.layout == exact(plan("tiny", "4xH200", sequence_length=256, batch="16seqs", layout="tp=2,pp=2").ask,
                               parse_settings("tp=2,pp=2,recompute=full,mbs=2", flag="", several=False))  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "words", "kernel", "written"),
    [
        ("8xH200", "ep=8,zero=1", "quack", ""),
        ("8xB200", "ep=8,zero=1", "grouped", ""),
        ("8xA100", "ep=8,zero=3,recompute=full", "reference", ""),
        ("8xMI300X", "ep=8,zero=1", "reference", ""),
        ("8xH200", "ep=8,zero=1,experts=reference", "reference", ",experts=reference"),
        ("8xH200", "ep=8,zero=1,experts=grouped", "grouped", ",experts=grouped"),
    ],
)
def test_experts_have_the_fastest_kernel_of_the_gpu(
    tell: Tell, tmp_path: Path, gpus: str, words: str, kernel: str, written: str
) -> None:
    """It is priced, shown only where it is not the default, and written for the run."""
    one = ("plan", "qwen3-30b-a3b", "--gpus", gpus, "--seq", "1024", "--batch", "8seqs", "--layout", words)
    told = tell(*one, "--out", "run.toml")
    assert told.code == 0, told.err
    assert resolve(tmp_path / "run.toml").run.layout.experts == kernel
    assert ("experts=" in told.out) == bool(written) and f"{written}: " in told.out
    assert json.loads(tell(*one, "--json").out)["layouts"][0]["layout"].get("experts", "reference") == kernel


def test_a_run_file_has_what_the_plan_chose(tell: Tell, tmp_path: Path) -> None:
    written = "zero=3,reshard_after_step=true,recompute=full,recompute_every=2,loss_chunk=64,bucket_bytes=1048576"
    told = tell("plan", *TINY_STEP, "--layout", written, "--precision", "bf16_pure", "--out", "run.toml")
    assert told.code == 0, told.err
    run = resolve(tmp_path / "run.toml").run
    lay = run.layout
    assert (lay.zero, lay.reshard_after_step, lay.recompute_every, lay.loss, lay.loss_chunk) == (
        3,
        True,
        2,
        "chunked",
        64,
    )
    assert (lay.bucket_bytes, run.precision.policy) == (2**20, RECIPES["bf16_pure"])


def test_precision_by_name_is_priced_and_written(tell: Tell, tmp_path: Path) -> None:
    one = (*TINY_STEP, "--layout", "zero=1", "--json")
    plain, in_int8, but = (
        json.loads(tell("plan", *one, *words).out)["layouts"][0]["memory"]["optimizer_gib"]
        for words in ((), ("--modules", "*:moments=int8"), ("--modules", "*:moments=int8,embedding*:moments=fp32"))
    )
    assert in_int8 < but < plain
    told = tell("plan", *one, "--precision", "fp8_rowwise", "--modules", "*.o.*:linears=bf16", "--out", "run.toml")
    assert told.code == 0, told.err
    modules = (Pattern("*.o.*", "linears", "bf16"),)
    assert resolve(tmp_path / "run.toml").run.precision.policy == replace(RECIPES["fp8_rowwise"], modules=modules)
    told = tell("plan", *one, "--modules", "embeding*:moments=int8")
    assert told.code == 2 and "--modules · found embeding*:moments=int8 / allowed embedding.weight" in told.err

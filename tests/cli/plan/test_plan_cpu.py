"""`penteract plan` with the hardware file of a CPU: its ranks are processes, which share the memory of their host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli.plan.tiny_step import Tell
from penteract.api import plan
from penteract.config.catalog.hardware import FOLDER
from penteract.config.device_words import CPU, device_word, of_cpu
from penteract.config.hardware import cluster
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.resolved_run import resolve
from penteract.measure.rehearse.rehearsing import target_of

MEASURED = (FOLDER / "8xh200.toml").read_text(encoding="utf-8")
MEASURED = re.sub(r"^\[process\]\n(?:\w+ = .*\n)*", "", MEASURED, flags=re.MULTILINE)  # of GPUs alone
CARD = (f'name = "{CPU}", memory_gib = 16.0, bf16 = 0.1, tf32 = 0.0, fp32 = 0.3, fp8 = 0.0, fp64 = 0.1, hbm = 30.0, '
        "multiprocessors = 2")  # fmt: skip
STEP = ("tiny", "--gpus", "mine.toml", "--seq", "256", "--batch", "16seqs", "--precision", "fp32")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file, for as many processes as a test asks for."""
    return of_processes(tmp_path / "mine.toml", 1)


def of_processes(path: Path, gpus: int) -> Path:
    node = 'gpu = "H200"\ngpus = 8\ngpus_per_node = 8\n'
    assert node in MEASURED
    mine = f'inside = "pcie5"\ngpus = {gpus}\ngpus_per_node = {gpus}\ngpu = {{ {CARD} }}\n'
    path.write_text(MEASURED.replace(node, mine), encoding="utf-8")
    return path


def test_its_ranks_are_processes_throughout(tell: Tell, mine: Path) -> None:
    told = tell("plan", *STEP, "--why", 1, "--tokens", "1M", "--usd-per-gpu-hour", 1)
    assert (told.code, told.err) == (0, "")
    assert "The CPU's host offers 16.00 GiB; tensors may take 14.72 GiB (8% is left to its system, comm" in told.out
    for words in ("tok/s/process", "MiB a process of ", "process-hours", " on 1 process,",
                  "What takes the memory of a process"):  # fmt: skip
        assert words in told.out, words
    answer = told.out.partition("Rates measured")[0]  # which names the device that was measured
    assert "GPU" not in answer and "CUDA" not in answer
    of_processes(mine, 4)
    shared = tell("plan", *STEP, "--fix", "pp=2", "--why", 1).out
    assert "What takes the memory of the fullest process, of pipeline rank" in shared and "GPU" not in shared


def test_its_kernels_run_on_a_cpu(tell: Tell, started: list[dict[str, Any]], mine: Path) -> None:
    """Those for GPUs were planned, and `train` then refused the run file."""
    assert tell("plan", *STEP, "--out", "run.toml").code == 0
    layout = resolve("run.toml").run.layout
    assert (layout.elementwise, layout.attention, layout.fuse) == ("reference", "reference", ())
    told = tell("train", "run.toml")
    assert (told.code, told.err, len(started)) == (0, "", 1)
    of_experts = plan("tiny-moe", str(mine), sequence_length=256, batch="16seqs", precision="fp32").best
    assert of_experts.layout.experts == "reference"
    assert target_of(started[0]["resolved"].run, cluster(str(mine))).type == "cpu"


@pytest.mark.parametrize("kernel", ["elementwise=triton", "attention=flash", "attention=cudnn"])
def test_kernels_for_gpus_are_refused(tell: Tell, mine: Path, kernel: str) -> None:
    assert mine.is_file()
    setting = kernel.partition("=")[0]
    for option in ("--fix", "--layout"):
        told = tell("plan", *STEP, option, kernel)
        assert told.code == 2 and told.err.endswith(f" · fix: {option} {setting}=reference, or leave {setting} out\n")
    assert tell("plan", *STEP, "--fix", f"{setting}=reference").code == 0


def test_several_processes_are_said_to_share_it(tell: Tell, mine: Path) -> None:
    note = "Note: processes of a CPU share its cores and its memory; here each is planned with all of both"
    assert note not in tell("plan", *STEP).out
    of_processes(mine, 2)
    assert note in tell("plan", *STEP).out


def test_a_cpu_is_measured_not_named(tell: Tell) -> None:
    assert tell("plan", "tiny", "--gpus", "cpu").err.endswith(" · fix: penteract calibrate, then --gpus here\n")


def test_more_processes_are_no_fix_where_memory_is_short(tell: Tell, mine: Path) -> None:
    """They would share what there is."""
    words = ["plan", "llama-3.1-8b", "--gpus", mine, "--seq", "256", "--batch", "16seqs"]
    told = tell(*words)
    assert told.code == 2 and "GPU" not in told.err
    assert " GiB a process / allowed 14.72 GiB · fix: a host with more memory, or a shorter --seq\n" in told.err
    assert "More processes share the same memory" in told.out and "it fits" not in told.out
    assert "no layout of 1 process has these values" in tell("plan", *STEP, "--fix", "tp=2").err
    for option in ("--out", "--trace"):
        assert "GiB a process" in tell(*words, "--layout", "mbs=1", option, "here.json").err
    experts = plan("mixtral-8x7b", str(of_processes(mine, 4)), headroom=0.0, batch="8seqs", fix="ep=4,zero=3")
    assert experts.refusal is not None and "GPU" not in str(experts.refusal)


def test_no_option_names_more_of_a_measured_gpu(tell: Tell, mine: Path) -> None:
    """`--gpus 8 × mine` would be refused."""
    mine.write_text(mine.read_text().replace(f'name = "{CPU}"', 'name = "Other"'), encoding="utf-8")
    told = tell("plan", "llama-3.1-8b", "--gpus", mine, "--seq", "256", "--batch", "16seqs")
    assert told.code == 2 and "GiB a GPU / allowed 14.72 GiB · fix: more GPUs (" in told.err
    assert " × mine would do)" in told.err


def test_one_word_for_what_a_rank_has(mine: Path) -> None:
    assert of_cpu(cluster(str(mine))) and not of_cpu(cluster("8xH200"))
    assert [device_word(n, on_cpus=True) for n in (1, 2)] == ["process", "processes"]
    assert [device_word(n, on_cpus=False) for n in (1, 2)] == ["GPU", "GPUs"]


def test_the_usual_precision_is_that_of_train(mine: Path) -> None:
    asked: dict[str, Any] = {"sequence_length": 256, "batch": "16seqs", "layout": "dp=1"}
    assert plan("tiny", str(mine), **asked).estimator.policy == RECIPES["fp32"]
    assert plan("tiny", "1xH200", **asked).estimator.policy == RECIPES["bf16"]

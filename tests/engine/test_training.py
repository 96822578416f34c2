"""The trainer as a person runs it: processes, files, exit codes. Most are forked from one that has torch already."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forks
from penteract.config.files.run_folder import commands
from penteract.engine.session.outputs.metrics import read_metrics

SMALL = (
    "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0",
)  # fmt: skip


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", *asked(folder, *words)]


def asked(folder: Path, *words: str) -> list[str]:
    """`words` come in the place of those of SMALL that set the same."""
    given = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if word.partition("=")[0] not in given]
    return ["penteract", "train", *small, f"--output.folder={folder}", *words]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """To the end."""
    return forks.penteract(asked(folder, *words)[1:], environment())


def train(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Run to the end; the closing line of --json."""
    done = run(folder, "--json", *words)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six steps of tiny on one rank, with a checkpoint every three."""
    folder = tmp_path_factory.mktemp("runs")
    return train(folder, "--preset=tiny", "--steps=6", "--checkpoint.every=3", "--checkpoint.keep=0")


def test_one_rank_learns_and_its_memory_was_foretold(base: dict[str, Any]) -> None:
    assert base["steps"] == 6
    assert base["loss_last"] < base["loss_first"] - 0.2
    assert base["memory"]["measured_gib"] == pytest.approx(base["memory"]["predicted_gib"], rel=1e-3)
    assert base["layout"]["dp"] == 1 and base["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "layout",
    [
        ("--parallel.tp=2", "--parallel.pp=2"),
        ("--parallel.dp=2", "--parallel.cp=2", "--parallel.cp_method=ring"),
        ("--parallel.pp=4", "--parallel.schedule=zb_h1"),
        ("--parallel.dp=2", "--parallel.tp=2", "--parallel.zero=1"),
    ],
    ids=["tp2-pp2", "dp2-cp2-ring", "pp4-zb", "dp2-tp2-zero"],
)
def test_four_ranks_train_the_same_model(base: dict[str, Any], tmp_path: Path, layout: tuple[str, ...]) -> None:
    ran = train(tmp_path, "--preset=tiny", "--steps=6", f"--compare={base['run_dir']}", *layout)
    assert ran["max_abs_loss_difference"] <= 1e-4
    assert ran["max_rel_gradient_difference_step1"] <= 1e-4
    assert ran["memory"]["measured_gib"] == pytest.approx(ran["memory"]["predicted_gib"], rel=0.02)


def test_expert_parallel_trains_the_same_model(tmp_path: Path) -> None:
    one = train(tmp_path, "--preset=tiny-moe", "--steps=3")
    assert all(row["train/balance_loss"] > 0 for row in read_metrics(Path(one["run_dir"]) / "metrics.jsonl"))
    four = train(tmp_path, "--preset=tiny-moe", "--steps=3", "--parallel.ep=4", f"--compare={one['run_dir']}")
    assert four["layout"]["dp"] == 4
    assert four["max_abs_loss_difference"] <= 1e-4
    assert four["max_rel_gradient_difference_step1"] <= 1e-4


def test_every_term_of_the_loss_is_in_the_metrics(tmp_path: Path) -> None:
    """A model that knows nothing yet is as unsure of the token after the next as of the next: half of that is here."""
    ran = train(tmp_path, "--preset=tiny-latent", "--steps=1", "--model.mtp_loss_coefficient=0.5")
    (row,) = read_metrics(Path(ran["run_dir"]) / "metrics.jsonl")
    unsure = math.log(264)  # of as many rows; logits that are not all alike add a little
    assert 0.5 * unsure < row["train/mtp_loss"] < 0.5 * unsure * 1.1
    assert unsure < row["train/loss"] < unsure * 1.1
    assert "train/balance_loss" not in row  # its experts are balanced by a bias


def test_resuming_goes_on_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(base["run_dir"], copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    train(tmp_path, f"--resume={copy}")
    text = (copy / "command.txt").read_text()
    assert len(commands(text)) == 2 and ", from step 4\n" in text
    settings = (copy / "run.toml").read_text()
    assert "# --training.steps\n" in settings and "# preset tiny\n" in settings and "# run.toml" not in settings
    for folder in (copy, Path(base["run_dir"])):
        assert not list(folder.glob("checkpoints/work-*"))  # the run has ended
    assert f"#   penteract train --resume {copy}\n" in settings and "the same run" not in settings
    for written in (settings, (Path(base["run_dir"]) / "run.toml").read_text()):
        assert 'device = "cpu"' in written and '"auto"' not in written
    first, again = (read_metrics(Path(f) / "metrics.jsonl") for f in (base["run_dir"], copy))
    for name in ("train/loss", "train/grad_norm", "train/lr", "step"):
        assert [r[name] for r in first] == [r[name] for r in again]
    files = sorted(f.name for f in (copy / "checkpoints" / "step-00000006").glob("*.safetensors"))
    assert files
    for f in files:
        ours, theirs = (Path(d) / "checkpoints" / "step-00000006" / f for d in (copy, base["run_dir"]))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_bad_line_of_metrics_stops_neither_a_resume_nor_a_comparison(base: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(base["run_dir"], copy, symlinks=True)
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([rows[0], '{"step": 2, "tok\n', *rows[2:]]))
    done = run(tmp_path, "--json", f"--compare={copy}", "--preset=tiny", "--steps=3", "--parallel.dp=2")
    assert done.returncode == 0 and "1 line is no row of metrics (line 2" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["max_abs_loss_difference"] <= 1e-4
    done = run(tmp_path, f"--resume={copy}", "--steps=8", "--parallel.dp=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no row of metrics") == 1 and "set aside in metrics.bad.jsonl" in done.stderr
    assert (copy / "metrics.bad.jsonl").read_text() == '{"step": 2, "tok\n'
    assert [row["step"] for row in read_metrics(copy / "metrics.jsonl")] == [1, 3, 4, 5, 6, 7, 8]


def in_the_middle(folder: Path) -> None:
    """Wait until a step is done."""
    metrics = folder / "latest" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)


def test_a_rank_that_dies_of_a_signal_is_said_once_with_its_cause(tmp_path: Path) -> None:
    words = asked(tmp_path, "--preset=tiny", "--steps=2000", "--parallel.dp=2")
    with forks.begun(words[1:], environment()) as command:
        in_the_middle(tmp_path)
        pid = command.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGSEGV)
        done = command.result(60)
    assert done.returncode == 72, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error[LOST]: rank 1 was ended by SIGSEGV: a library used memory that is not its own")
    assert "memory left" not in (tmp_path / "latest" / "errors.jsonl").read_text()


def test_interrupted_it_saves_and_can_go_on(tmp_path: Path) -> None:
    words = asked(tmp_path, "--preset=tiny", "--steps=2000", "--parallel.dp=2")
    with forks.begun(words[1:], environment()) as command:
        in_the_middle(tmp_path)
        assert command.process.pid is not None
        os.kill(command.process.pid, signal.SIGINT)
        done = command.result(60)
    said = done.stderr
    assert done.returncode == 75, said
    steps = [r["step"] for r in read_metrics(tmp_path / "latest" / "metrics.jsonl")]
    saved = tmp_path / "latest" / "checkpoints" / f"step-{steps[-1]:08d}"
    assert (saved / "manifest.json").is_file()
    assert said.count("error[STOPPED]") == 1 and "--resume" in said


def test_torchrun_ranks_are_joined(base: dict[str, Any], tmp_path: Path) -> None:
    words = command(tmp_path, "--json", "--preset=tiny", "--steps=2", f"--compare={base['run_dir']}", "--parallel.tp=2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *words[1:]]
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = json.loads(done.stdout.splitlines()[-1])
    assert ran["layout"]["tp"] == 2
    assert ran["max_rel_gradient_difference_step1"] <= 1e-4


def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    words = ("--preset=tiny", "--steps=9", "--parallel.dp=2")
    done = run(tmp_path, *words, "--optimizer.learning_rate=1000", "--optimizer.clip_norm=0")
    assert done.returncode == 73
    assert "error[NUMERICS]" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "latest" / "errors.jsonl").is_file()


def tokens_with_a_bad_one(folder: Path, bad: int) -> str:
    """A file of 40 windows of 64 tokens that was damaged after it was written: token `bad` is none. Its description
    says how large its ids are, so they are not all read before the run."""
    ids = np.full(40 * 64 + 1, ord("a"), "<u2")
    ids[bad] = 60_000
    ids.tofile(folder / "ids.bin")
    (folder / "ids.bin.json").write_text(f'{{"dtype": "uint16", "largest": {ord("a")}}}')
    return f"--data.source={folder / 'ids.bin'}"


def test_a_batch_that_cannot_be_drawn_ends_the_run_on_every_rank_with_its_step_saved(tmp_path: Path) -> None:
    data = (tokens_with_a_bad_one(tmp_path, 600), "--data.validation_fraction=0")
    done = run(tmp_path, "--preset=tiny", "--steps=12", "--parallel.dp=2", *data)
    assert done.returncode == 65
    errors = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and "Traceback" not in done.stderr
    saved = [folder.name for folder in (tmp_path / "latest" / "checkpoints").glob("step-*")]
    trained = read_metrics(tmp_path / "latest" / "metrics.jsonl")
    assert trained and saved == [f"step-{len(trained):08d}"]
    assert errors[0].startswith("error[TOKEN_ID]: a token id is outside the vocabulary; step ")
    assert f"step {len(trained)} is saved" in errors[0]


def test_what_cannot_be_validated_on_is_refused_before_the_first_step(tmp_path: Path) -> None:
    data = (tokens_with_a_bad_one(tmp_path, 2500), "--data.validation_fraction=0.12")
    done = run(tmp_path, "--preset=tiny", "--steps=9", "--training.validation_every=3", *data)
    assert done.returncode == 65 and "error[TOKEN_ID]" in done.stderr
    assert not (tmp_path / "latest").exists() and len([*tmp_path.glob("*_tiny_*")]) == 1  # refused, so not the latest


def _all_of(run: Path) -> dict[str, bytes]:
    """All files, without those that say who had the run."""
    files = (path for path in sorted(run.rglob("*")) if path.is_file() and path.parent.name != "epochs")
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--steps=6",),
            "error[STEPS]: the run is already that far · --steps · found 6 / allowed > 6 · fix: --steps 12",
        ),
        (
            ("--steps=9", "--training.seed=7", "--parallel.dp=2"),
            "error[RESUME]: the run was trained with another training.seed · --resume · found 7 / allowed 0"
            " · fix: --training.seed 0, or a new run without --resume",
        ),
    ],
    ids=["steps", "seed"],
)
def test_a_refused_resume_leaves_the_run_as_it_was(base: dict[str, Any], words: tuple[str, ...], line: str) -> None:
    folder = Path(base["run_dir"])
    before = _all_of(folder)
    done = run(folder.parent, f"--resume={folder}", *words)
    assert (done.returncode, done.stderr.splitlines()) == (2, [line])
    assert _all_of(folder) == before


def test_a_resume_in_another_precision_says_so_once(base: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(base["run_dir"], copy, symlinks=True)
    words = (f"--resume={copy}", "--checkpoint.every=1", "--parallel.dp=2")
    done = run(tmp_path, *words, "--steps=7", "--precision.dtype=bf16_pure")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trained in fp32 so far, goes on in bf16_pure: ") == 1  # of two ranks, one


def test_a_resume_at_another_learning_rate_says_so_once(base: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(base["run_dir"], copy, symlinks=True)
    words, line = (f"--resume={copy}", "--parallel.dp=2"), "where the schedule so far had"
    done = run(tmp_path, *words, "--steps=7", "--learning_rate.warmup_steps=2")
    assert (done.returncode, done.stderr.count(line)) == (0, 1), done.stderr  # of two ranks, one
    done = run(tmp_path, *words, "--steps=9", "--learning_rate.decay_end=7")
    assert (done.returncode, done.stderr.count(line)) == (0, 0), done.stderr
    *_, seventh, eighth, ninth = (row["train/lr"] for row in read_metrics(copy / "metrics.jsonl"))
    assert seventh == eighth == ninth == pytest.approx(1e-4)


def test_a_resume_that_fails_leaves_the_status_of_the_run(base: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(base["run_dir"], copy, symlinks=True)
    for name in ("step-00000003", "step-00000006"):
        file = copy / "checkpoints" / name / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")  # of its size, but not what was written
    before = _all_of(copy)
    done = run(tmp_path, f"--resume={copy}", "--steps=9")
    assert (done.returncode, done.stderr.count("error[CHECKPOINT]")) == (65, 1)
    after = _all_of(copy)
    assert b"its bytes are not" in after.pop("errors.jsonl")  # a failure, and a record of it
    assert after == before


def test_ranks_of_torchrun_refuse_a_resume_and_leave_the_run_as_it_was(base: dict[str, Any]) -> None:
    folder = Path(base["run_dir"])
    before = _all_of(folder)
    words = asked(folder.parent, f"--resume={folder}", "--steps=9", "--model.layers=2", "--parallel.tp=2")[1:]
    done = forks.ranks([words, words], environment())
    assert all(one.returncode != 0 for one in done)
    said = "".join(one.stderr for one in done)
    assert "another model.layers · --resume · found 2 / allowed 4 · fix: --model.layers 4" in said
    assert _all_of(folder) == before

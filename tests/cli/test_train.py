"""`penteract train` up to the engine: what it hands over, and what it refuses."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penteract.cli.resolve import planned_run
from penteract.cli.resolve.card_cluster import Card
from penteract.cli.resolve.predicted_run import predict_run
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.rules.kernel_packages import PACKAGES
from penteract.engine.doctor.machine import Torch

Tell = Callable[..., Any]
Calls = list[dict[str, Any]]


def a_run(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(resolve(overrides=overrides)), encoding="utf-8")
    (folder / "metrics.jsonl").touch()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").touch()
    return folder


def test_alone_it_trains_tiny(tell: Tell, started: Calls) -> None:
    assert tell("train").code == 0
    (call,) = started
    assert call["resolved"].run == resolve().run
    assert call["predicted"]().allocated_bytes > 2**20
    assert {k: v for k, v in call.items() if k not in ("resolved", "predicted", "explain")} == {
        "launched": False, "compare": None, "resume": None, "init": None, "into": None, "grace": 30.0, "json": False,
        "debug": False, "prepared": None,
    }  # fmt: skip


def test_values_options_and_a_file_in_any_order(tell: Tell, started: Calls, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[training]\nseed = 4\nsteps = 9")
    words = "train parallel.pp=2 --json --parallel.tp 2 run.toml --steps 3 --data.pack_documents"
    assert tell(*words.split()).code == 0
    resolved = started[0]["resolved"]
    assert (resolved.run.layout.tp, resolved.run.layout.pp) == (2, 2)
    assert (resolved.run.train.seed, resolved.run.train.steps) == (4, 3)
    assert resolved.origins["training.steps"] == "--training.steps"
    assert started[0]["json"] is True


def test_all_packages_that_kernels_need_are_named_before_anything_starts(
    tell: Tell, started: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = ("plan", "llama-3.2-1b", "--gpus", "1xH200", "--seq", "1024", "--batch", "8seqs")
    assert tell(*planned, "--out", "here.toml", "--packages", "none").code == 0
    assert tell(*planned, "--out", "run.toml").code == 0
    host = Card(name="H200", free=140 * 2**30, capability=(9, 0), packages=frozenset({"triton"}))
    monkeypatch.setattr(planned_run, "card_here", lambda device, launched: host)
    monkeypatch.setattr("penteract.cli.train.packages_here", frozenset)
    refused = tell("train", "run.toml")
    assert refused.code == 2 and "found a python without flash-attn-4 and quack-kernels" in refused.err
    assert "fix: pip install 'penteract[gpu]', or plan with --packages none" in refused.err
    assert not started and not (tmp_path / "runs").exists()
    assert tell("train", "here.toml").code == 0
    note = tell("train", "run.toml", "--slurm", "--dry-run").err
    assert "note: this run's kernels need flash-attn-4 and quack-kernels" in note
    contained = ("--slurm.container", "image.sqsh")
    assert "this run's kernels" not in tell("train", "run.toml", "--slurm", "--dry-run", *contained).err
    monkeypatch.setattr("penteract.cli.train.packages_here", lambda: PACKAGES)
    assert tell("train", "run.toml").code == 0


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_without_gpus_a_run_for_gpus_is_told_so_before_anything_starts(
    tell: Tell, started: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Its memory is no matter then. Torch has the last word: a host may have GPUs that nothing else names."""
    planned = ("plan", "llama-3.1-8b", "--gpus", "8xH200", "--fix", "dp=8,zero=2", "--out", "run.toml")
    assert tell(*planned).code == 0
    seen = Torch(version="2.9.0", cuda="12.8", reason="no NVIDIA driver is loaded")
    monkeypatch.setattr("penteract.engine.doctor.probe.torch.torch", lambda: seen)
    monkeypatch.setattr("penteract.cli.resolve.gpu_defaults.DRIVER", tmp_path / "none")
    refused = tell(verb, "run.toml")
    assert refused.code == 2 and refused.err.count("\n") == 1
    told = r"error\[DEVICE\]: this run is for GPUs, and there is none here · kernels\.attention \(run\.toml:\d+\) "
    assert re.match(told, refused.err)
    assert (
        "· found kernels.attention = fa4, kernels.elementwise = triton; no NVIDIA driver is loaded / allowed a GPU for "
        "each rank, 8 in all · fix: train where GPUs are (penteract doctor says what a host has), or here on CPUs with "
        "--kernels.attention reference --kernels.elementwise reference\n"
    ) in refused.err
    assert not started and not (tmp_path / "runs").exists() and not (tmp_path / "profiles").exists()
    if verb == "train":
        assert "precision.device = cuda; no NVIDIA driver" in tell("train", "--precision.device", "cuda").err
        plain = ("--kernels.attention", "reference", "--kernels.elementwise", "reference")
        assert tell("train", "run.toml", *plain).code == tell("train", "run.toml", "--draw").code == 0
        monkeypatch.setattr("penteract.engine.doctor.probe.torch.torch", lambda: replace(seen, available=True))
        assert tell("train", "run.toml").code == 0


def test_the_engines_exit_code_is_the_programs(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["penteract.engine.runtime.start"], "train", lambda *_, **__: 75)
    assert tell("train").code == 75


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise KeyError("lost\nkey")

    monkeypatch.setattr(sys.modules["penteract.engine.runtime.start"], "train", broken)
    told = tell("train")
    assert (told.code, told.err.count("\n")) == (70, 1)
    assert told.err.startswith("error[BUG]: KeyError: ")
    assert "--debug" in told.err
    told = tell("train", "--debug")
    assert told.code == 70
    assert "Traceback" in told.err


def test_without_torch_the_fix_is_to_install_it(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penteract.engine.runtime.start")
    monkeypatch.setattr("penteract.cli.torch_modules.find_spec", lambda _: None)
    assert (
        tell("train").err == "error[TORCH]: training needs torch · found none · fix: pip install 'penteract[train]'\n"
    )


def test_runs_to_compare_with_and_to_resume(tell: Tell, started: Calls, tmp_path: Path) -> None:
    old = a_run(tmp_path / "runs" / "a")
    new = a_run(tmp_path / "runs" / "b", "training.seed=9")
    os.utime(old / "run.toml", (1, 1))
    assert tell("train", "--compare", "latest").code == 0
    assert started[-1]["compare"].resolve() == new
    (tmp_path / "runs" / "latest").symlink_to("a")
    assert tell("train", "--compare", "latest").code == 0
    assert started[-1]["compare"].resolve() == old
    (old / "metrics.jsonl").unlink()  # one that failed before its first step
    assert tell("train", "--compare", "latest").code == 0
    assert started[-1]["compare"].resolve() == new
    assert tell("train", "--resume", new).code == 0
    assert started[-1]["resume"] == new
    assert started[-1]["resolved"].run.train.seed == 9  # a resumed run is its own run file
    a_run(tmp_path / "elsewhere" / "c", "training.seed=5")
    assert tell("train", "--resume", "latest", "--output.folder", "elsewhere").code == 0
    assert started[-1]["resolved"].run.train.seed == 5


def test_into_a_folder_it_begins_or_goes_on(tell: Tell, started: Calls, tmp_path: Path) -> None:
    words = ["train", "--into", "runs/mine", "--preset", "tiny", "training.steps=7"]
    assert tell(*words).code == 0
    assert (started[-1]["into"], started[-1]["resume"]) == (Path("runs/mine"), None)
    run = a_run(tmp_path / "runs" / "mine", "training.seed=4")
    (run / "checkpoints" / "latest").unlink()  # it was killed before it saved
    assert tell(*words).code == 0
    assert (started[-1]["into"], started[-1]["resolved"].run.train.seed) == (Path("runs/mine"), 0)
    (run / "checkpoints" / "latest").touch()
    assert tell(*words).code == 0
    assert (started[-1]["into"], started[-1]["resume"]) == (None, Path("runs/mine"))
    assert (started[-1]["resolved"].run.train.seed, started[-1]["resolved"].run.train.steps) == (4, 7)


UNSECTIONED = "error[USAGE]: a value of the run is named with its section · found"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--compare", "latest"], "error[RUN]: there is no run yet · --compare"),
        (["--resume", "latest"], "error[RUN]: there is no run yet · --resume"),
        (["--resume", "nowhere"], "error[RUN]: no such folder"),
        (["--resume", "latest", "--into", "a"], "error[USAGE]: a resumed run has its folder"),
        (["--dry-run"], "error[USAGE]: only a job can be printed"),
        (["--resume", "\0"], "error[RUN]: no such folder"),
        (["--compare", "."], "error[RUN]: a folder without run.toml is no run"),
        (["none.toml"], "error[FILE]: cannot be read: No such file"),
        (["tiny-moe"], "error[FILE]: the name of a preset or a model, where a run file is expected · found tiny-moe"),
        (["llama-3.1-8b"], "error[FILE]: the name of a preset or a model, where a run file is expected"),
        (["data.source=none.txt"], "error[FILE]: no such file or folder · data.source (--data.source) · found none"),
        (["tokenizer.source=none.json"], "error[FILE]: no such file or folder · tokenizer.source"),
        (["--tp", "4"], "error[USAGE]: a value of the run is named with its section · found --tp · fix: --parallel.tp"),
        (["--precision", "fp7"], f"{UNSECTIONED} --precision · fix: --precision.dtype"),
        (["--lr", "1e-3"], f"{UNSECTIONED} --lr · fix: --optimizer.learning_rate"),
        (["--batch-size", "8"], f"{UNSECTIONED} --batch-size · fix: --batch.global_batch_size"),
        (["--gpus", "8"], f"{UNSECTIONED} --gpus · fix: --parallel.dp"),
        (["--stepz", "4"], "error[USAGE]: Unknown option: --stepz. Did you mean --steps?"),
        (["--steps", "x"], "error[USAGE]: Invalid value for --steps"),
        (["--steps"], "error[USAGE]"),
        (["--steps", "0"], "error[VALUE]"),
        (["--log-level", "loud"], "error[USAGE]"),
        (["--preset", "huge"], "error[PRESET]"),
        (["a", "b"], "error[USAGE]"),
        (["parallel.tp=3"], "error[LAYOUT]: tp = 3 does not divide attention heads = 8"),
    ],
)
def test_refusals(tell: Tell, started: Calls, words: list[str], line: str) -> None:
    told = tell("train", *words)
    assert told.code == 2
    assert told.err.startswith(line)
    assert all(row.startswith("error[") for row in told.err.splitlines())
    assert not started


def test_a_refusal_as_json(tell: Tell) -> None:
    assert tell("train", "--json", "parallel.tp=3").out.startswith('{"error": {"code": "LAYOUT"')


def test_a_launchers_ranks_decide_dp(tell: Tell, started: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert tell("train", "--parallel.tp", "2").code == 0
    assert started[-1]["resolved"].run.layout.dp == 4
    assert tell("train", "--parallel.tp", "2", "--parallel.dp", "2").err.endswith("fix: --parallel.dp 4\n")
    monkeypatch.setenv("RANK", "8")
    assert tell("train").err.startswith("error[LAUNCH]")
    monkeypatch.setenv("RANK", "two")
    assert tell("train").err.startswith("error[LAUNCH]")


def test_a_drawing_starts_nothing(tell: Tell, started: Calls) -> None:
    told = tell("train", "--draw", "--parallel.pp", "4")
    assert told.code == 0
    assert len([row for row in told.out.splitlines() if row.startswith("rank ")]) == 4
    assert not started


def test_a_tracker_that_is_not_installed_is_one_line_with_the_fix(
    tell: Tell, started: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penteract.cli.train.find_spec", lambda name: None)
    told = tell("train", 'output.trackers=["wandb", "tensorboard"]')
    assert (told.code, told.err.count("\n"), started) == (2, 1, [])
    assert "penteract[wandb,tensorboard]" in told.err and "output.trackers" in told.err
    assert tell("train", 'output.trackers=["wandb", "wandb"]').code == 2
    assert tell("train", 'output.trackers=["mlflow"]').code == 2
    assert tell("train", "output.trackers=none").code == 0


@pytest.mark.parametrize(
    ("card", "nodes", "peak"),
    [("NVIDIA H200", 8, 989.4e12), ("NVIDIA A100-SXM4-80GB", 8, 312e12), ("NVIDIA H100 PCIe", 8, 756e12),
     ("NVIDIA H100 80GB HBM3", 8, 989.4e12), ("NVIDIA H200", 4, 989.4e12)],
)  # fmt: skip
def test_the_time_of_a_step_is_predicted_on_a_card_of_the_catalog(card: str, nodes: int, peak: float) -> None:
    run = resolve(None, "tiny", ["precision.dtype=bf16", "parallel.dp=8"], world=8).run
    here = Card(name=card, free=2**36, capability=(9, 0), packages=frozenset())
    predicted = predict_run(run, here, {"LOCAL_WORLD_SIZE": str(nodes)})
    assert predicted.step_s and predicted.peak_flops == pytest.approx(8 * peak, rel=1e-3)
    assert 0 < (predicted.mfu(predicted.step_s) or 0) < 1
    unknown = predict_run(run, Card(name="GeForce 1", free=1, capability=(1, 0), packages=frozenset()))
    assert (unknown.step_s, unknown.mfu(1.0)) == (None, None)
    assert (unknown.allocated_bytes, unknown.model_flops) == (predicted.allocated_bytes, predicted.model_flops)


def test_what_makes_losses_differ_from_the_other_run_is_named(tell: Tell, started: Calls, tmp_path: Path) -> None:
    """More steps are another schedule of learning rates. Layout and micro-batch change rounding alone."""
    old = a_run(tmp_path / "runs" / "old", "training.steps=20", "parallel.tp=2")
    same, other = (tell("train", "--steps", str(n), "--compare", str(old)).out for n in (20, 40))
    assert "Unlike old" not in same
    assert "Unlike old, so losses differ by more than rounding: training.steps 40 (there 20)" in other

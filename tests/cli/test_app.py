"""The program around its verbs."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penteract._version import __version__
from penteract.cli.resolve.overrides import split_overrides
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.checkpoint.durable import failing
from penteract.engine.hf.folder import ELSEWHERE
from penteract.engine.run_folder import rundir
from penteract.errors import DiskFailure

Tell = Callable[..., Any]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["init", "--help"], []])
def test_help_shows_an_example(tell: Tell, words: list[str]) -> None:
    told = tell(*words)
    assert told.code == 0
    assert "penteract " + (words[0] if len(words) > 1 else "train") in told.out.split("Examples:")[1]


def test_version_is_a_line(tell: Tell) -> None:
    told = tell("--version")
    assert (told.code, told.out) == (0, f"{__version__}\n")


def test_init_writes_a_file_that_trains_tiny(tell: Tell, tmp_path: Path) -> None:
    assert tell("init").code == 0
    assert resolve(tmp_path / "run.toml").run == resolve().run
    again = tell("init")
    assert (again.code, again.err.split(" · ")[0]) == (2, "error[FILE]: it exists already")
    assert tell("init", "none/run.toml").code == 2
    assert tell("init", "parallel.tp=2").err.startswith("error[USAGE]: takes no values of a run")


def test_a_mistyped_verb(tell: Tell) -> None:
    told = tell("trian")
    assert told.code == 2
    assert told.err.startswith('error[USAGE]: Unknown command "trian". Did you mean "train"?')


def test_a_word_without_its_option(tell: Tell) -> None:
    told = tell("plan", "llama-3.1-8b", "8xH200")
    assert told.code == 2
    assert told.err == "error[USAGE]: no option takes this · found 8xH200 · fix: penteract plan --help\n"


def test_options_and_values_are_told_apart() -> None:
    words = ["train", "--parallel.tp", "2", "a.b/run.toml", "x.y=1 2", "--data.pack_documents", "--json", "--", "p.q=1"]
    verb, overrides = split_overrides(words)
    assert verb == ["train", "a.b/run.toml", "--json", "--", "p.q=1"]
    assert overrides == ["--parallel.tp=2", "x.y=1 2", "--data.pack_documents"]


@pytest.mark.parametrize("words", [["--help"], ["train", "parallel.tp=3"], ["train", "--draw"], ["init", "x.toml"]])
def test_torch_stays_away(tmp_path: Path, words: list[str]) -> None:
    """Help, a refusal, a drawing and a template start without torch."""
    code = f"import sys; from penteract.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--models"], ["plan", "gpt2", "--gpus", "1xH200", "--json"], ["train", "--draw"]]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "penteract", *words], cwd=tmp_path, stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert done.returncode == 74
    assert done.stderr.startswith("error[DISK]: what is printed cannot be written") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "penteract", "train", "parallel.tp=3", "--draw"]
        assert subprocess.run(words, cwd=tmp_path, stderr=full, check=False).returncode == 2


def test_a_setting_may_be_said_twice_and_over_a_file(tell: Tell, started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optimizer]\nlearning_rate = 1e-4\n")
    rates = ("--optimizer.learning_rate", "1e-3", "optimizer.learning_rate=0.001")
    assert tell("train", "run.toml", *rates, "--steps", "9", "--training.steps=9").code == 0
    (call,) = started
    assert call["resolved"].run.optimizer.learning_rate == 1e-3


def test_a_file_is_set_over_a_preset(tell: Tell, started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optimizer]\nlearning_rate = 1e-4\n")
    told = tell("train", "run.toml", "--preset", "tiny-moe")
    assert told.code == 0 and "Preset tiny-moe, and the values of run.toml over it\n" in told.out
    (call,) = started
    assert call["resolved"].run.model.name == "tiny-moe" and call["resolved"].run.optimizer.learning_rate == 1e-4


def test_a_resumed_run_takes_no_preset(tell: Tell, started: list[Any]) -> None:
    told = tell("train", "--resume", "latest", "--preset", "tiny")
    assert told.code == 2 and not started
    assert told.err == (
        "error[USAGE]: a resumed run has its model · found --resume and --preset · fix: leave one out\n"
    )


@pytest.mark.parametrize(
    ("words", "where"),
    [(("--steps", "0"), "training.steps (--steps)"),
     (("--usd-per-gpu-hour", "-1"), "slurm.usd_per_gpu_hour (--usd-per-gpu-hour)"),
     (("--training.steps", "0"), "training.steps (--training.steps)")],
)  # fmt: skip
def test_a_bad_value_is_named_as_it_was_given(tell: Tell, words: tuple[str, ...], where: str) -> None:
    told = tell("train", *words)
    assert told.code == 2 and told.err.startswith(f"error[VALUE]: not a value for this key · {where}")


# ---- fixes that the command has --------------------------------------------------------------------------------------


def test_weights_that_cannot_be_written_go_elsewhere(tmp_path: Path) -> None:
    """`convert` writes by what a run's checkpoints are written with, and has none of its options."""
    weights, inside = failing(tmp_path, "write weights", fix=ELSEWHERE), failing(tmp_path, "write a checkpoint")
    with pytest.raises(DiskFailure, match=f"fix: {ELSEWHERE}"), weights, inside:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(DiskFailure, match=r"choose another --checkpoint\.folder"), failing(tmp_path, "write"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_folder_that_cannot_be_made_is_called_as_it_was_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure, match="fix: choose another --into"):
        rundir.create(tmp_path / "runs", "tiny", into=tmp_path / "file" / "run")
    with pytest.raises(DiskFailure, match=r"fix: choose another --output\.folder"):
        rundir.create(tmp_path / "file", "tiny")


def test_a_disk_that_takes_no_file_has_a_fix(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", full)
    told = tell("init")
    assert told.code == 74
    assert told.err.startswith(
        "error[DISK]: cannot be written: Read-only file system · init run.toml · fix: name another"
    )

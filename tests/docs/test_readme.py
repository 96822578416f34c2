"""What README.md and docs/guide.md show works: commands resolve or run, and print what stands below them as `text`.
Blocks of `console` are quoted from a whole run, and not made again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import forks
from explore.served import served
from penteract.cli.app import _app
from penteract.cli.resolve.overrides import split_overrides
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import template

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/guide.md"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
COMMANDS += [c for c in re.findall(r"`([^`\n]+)`", PAGE) if c.startswith("torchrun ")]

# Values that make a run end soon; what a command says of its layout stays.
SHORT = (
    "batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=1", "precision.device=cpu",
    "training.sample_tokens=0", "training.validation_every=0",
)  # fmt: skip


def train_words(command: str) -> list[str] | None:
    """The words after `train` of a command that trains, however it is started."""
    words = shlex.split(command)
    if "train" not in words or "--draw" in words or "--dry-run" in words:
        return None
    return words[words.index("train") + 1 :]


def without(words: Sequence[str], *options: str) -> list[str]:
    """`words` without `options` and their values."""
    left = list(words)
    for option in options:
        if option in left:
            at = left.index(option)
            del left[at : at + 2]
    return left


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planner's run file, by the page's command."""
    (writes,) = (c for c in PLANS if c.endswith(f"--out {RUN_FILE}"))
    folder = tmp_path_factory.mktemp("written")
    assert forks.penteract(shlex.split(writes)[1:], ENVIRONMENT, folder=folder, limit=60).returncode == 0
    return folder / RUN_FILE


def run(words: Sequence[str], folder: Path, limit: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


TRAINING = [c for c in COMMANDS if train_words(c) is not None]
PLANS = [c for c in COMMANDS if c.startswith("penteract plan ")]
CONVERTING = [c for c in COMMANDS if c.startswith("penteract convert ")]  # what was trained before
SERVING = [c for c in COMMANDS if c.startswith("penteract explore")]  # until Ctrl-C
# What trains for a minute, or reads what that left: `tests/measure` runs them.
MEASURING = [c for c in COMMANDS if c.startswith(("penteract profile ", "penteract bench "))]
SHOWN = [(a, b) for a, b in pairwise(BLOCKS) if b[0] == "text"]  # run as people start them, and compared
COMPARED = [text.strip() for (kind, text), _ in SHOWN if kind == "sh"]
_LONGER = (*TRAINING, *CONVERTING, *SERVING, *MEASURING, *COMPARED)
QUICK = [c for c in COMMANDS if c.startswith("penteract ") and c not in _LONGER]
RUN_FILE = "8b.toml"  # the planner's; what `init` writes is a template's


def is_shown(expected: str, output: str) -> bool:
    """Whether the page's lines are the output's: `…` stands for any part of a line, and alone for any lines. How long
    the planner took is not compared."""
    lines = _timeless(expected.strip()).splitlines()
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in lines)
    return re.fullmatch(pattern, _timeless(output.strip()) + "\n") is not None


def _timeless(output: str) -> str:
    return re.sub(r"(?<= layouts in )[\d.]+ m?s(?=: )", "3 s", output)


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert len(TRAINING) >= 4 and len(PLANS) >= 6 and len(CONVERTING) == 1
    assert set(COMMANDS) == {*_LONGER, *QUICK, "make demo", "make test"}


@pytest.mark.parametrize(
    ("page", "output", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\nb", "a\nc\nb\n", False),
        ("a\n…\nb", "a\nc\nd\nb\n", True),
        ("a\n…\nb", "a\nc\nd\n", False),
        ("a (1.0) …", "a (1.0) and more", True),
        ("a (1.0) …", "a (1.1) and more", False),
        ("a (1.0)", "a (1.0) and more", False),
    ],
)
def test_what_is_shown(page: str, output: str, same: bool) -> None:
    assert is_shown(page, output) == same


@pytest.mark.parametrize("target", [c.split()[1] for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_resolve(command: str, tmp_path: Path, written: Path) -> None:
    verb, overrides = split_overrides(train_words(command) or [])
    file = next((w for w in verb if w.endswith(".toml")), None)
    if file == RUN_FILE:
        shutil.copy(written, tmp_path)
    elif file:
        (tmp_path / file).write_text(template(file))
    world = int(shlex.split(command)[2]) if command.startswith("torchrun --nproc-per-node ") else None
    found = resolve(tmp_path / file if file else None, None, overrides, world)
    degrees = {k: v for k, v in re.findall(r"--parallel\.(\w+) (\d+)", command)}
    assert {k: str(getattr(found.run.layout, k)) for k in degrees} == degrees
    assert world is None or found.run.layout.world == world


@pytest.mark.parametrize("command", MEASURING)
def test_measuring_commands_are_understood(command: str) -> None:
    """Each option is one of the command; each value of a run that is set has a key."""
    words, overrides = split_overrides(shlex.split(command)[1:])
    function, _, injected = _app(words[0]).parse_args(words, print_error=False, exit_on_error=False)
    assert callable(function) and (not overrides or "overrides" in injected)
    world = int(words[words.index("--ranks") + 1]) if "--ranks" in words else None
    resolve(None, "tiny", overrides, world)


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    if "--budget" in words:  # test_calibrate.py measures all that there is
        words = [*without(words, "--budget"), "--budget", "1"]
    done = forks.penteract(words, ENVIRONMENT, folder=tmp_path, limit=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", SERVING)
def test_serving_commands_serve(command: str) -> None:
    with served(*shlex.split(command)[2:]) as running:
        assert running.open().status == 303
        opening = running.ask("opening")[0]["question"]
        assert running.ask("memory", question=opening)[0]["figures"]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda pair: pair[0][0])
def test_output_is_as_shown(shown: tuple[tuple[str, str], tuple[str, str]], tmp_path: Path) -> None:
    (kind, source), (_, expected) = shown
    words = ["-c", source] if kind == "python" else ["-m", "penteract", *shlex.split(source)[1:]]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert is_shown(expected, done.stdout), done.stdout + done.stderr


def test_training_commands_run_in_their_order(tmp_path: Path) -> None:
    """The demo, then what the page does after it, each for a few steps: what `latest` means follows from the order."""
    # What needs nothing that came before has run above.
    others = (*SERVING, *MEASURING, *COMPARED, *(c for c in QUICK if not c.startswith("penteract init ")))
    shown = ("--draw", "--dry-run")  # these train nothing
    page = [c for c in COMMANDS if c.startswith("penteract ") and c not in others and not {*shown} & {*c.split()}]
    for i, command in enumerate(["penteract train --preset tiny", *page]):
        words = without(shlex.split(command)[1:], "--steps", "--batch.sequence_length")
        if words[0] == "train":
            words += [f"training.steps={1 + i}", *(SHORT if "--resume" not in words else ())]
        done = forks.penteract(words, ENVIRONMENT, folder=tmp_path, limit=180)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "--compare" in words:
            assert "largest difference to" in done.stdout
        if "--resume" in words:
            assert f"resumed from step {i} of runs/" in done.stderr
            assert " s of training · runs/" in done.stdout


def test_tour_is_as_long_as_it_says() -> None:
    tour = re.findall(r"^\d\. \[`([^`]+)`\]", PAGE, re.MULTILINE)
    said = int(re.search(r"Eight files, about (\d+) lines", PAGE)[1])  # type: ignore[index]
    assert len(tour) == 8
    assert abs(sum(len((ROOT / f).read_text().splitlines()) for f in tour) - said) <= 50

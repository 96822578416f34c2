"""From outside: two processes and one run's folder, a holder that is killed, a checkpoint that is damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
from penteract.engine.checkpoint import committed
from penteract.engine.session.outputs.metrics import read_metrics
from run_records import digests, steps_of

pytestmark = pytest.mark.waits(17)

SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=4",
)  # fmt: skip
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def words(folder: Path, *more: str) -> list[str]:
    return ["train", *SMALL, f"--output.folder={folder}", *more]


def until(happened: Callable[[], Any], limit: float = 60) -> Any:
    end = time.monotonic() + limit
    while not (found := happened()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps that nothing disturbed, on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    done = forks.penteract(words(folder, "--steps=12", "--parallel.dp=2", "--checkpoint.keep=0"), ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return (folder / "latest").resolve()


def train_to_step_five(words: list[str]) -> int:
    """`penteract WORDS` whose ranks, forked from it, stop before their sixth step until a signal ends them."""
    from penteract.engine.rank.rank_progress import RankProgress

    begin = RankProgress.begin_step

    def begin_or_stop(self: RankProgress, number: int, *, first: bool = False) -> None:
        if number == 6:
            os.kill(os.getpid(), signal.SIGSTOP)
        begin(self, number, first=first)

    RankProgress.begin_step = begin_or_stop  # type: ignore[method-assign]
    return forks._command(words, None)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, multiprocessing.Process]]:
    """The same run, whose ranks stop after the fifth step, with a checkpoint of the fourth."""
    process = forks.start(
        train_to_step_five,
        words(tmp_path, "--steps=12", "--parallel.dp=2", "--checkpoint.keep=0", "--checkpoint.asynchronous=false"),
        environment=ENVIRONMENT, out=tmp_path / "out", err=tmp_path / "err",
    )  # fmt: skip
    try:
        run = until(lambda: (tmp_path / "latest").exists() and (tmp_path / "latest").resolve())
        until(lambda: [c for c in committed(run / "checkpoints") if c.step == 4])
        yield run, process
    finally:
        process.kill()
        process.join()


def test_a_second_start_is_refused_and_a_killed_one_is_taken_over(
    running: tuple[Path, multiprocessing.Process], whole: Path, tmp_path: Path
) -> None:
    run, process = running
    os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    before = sorted(p.name for p in run.iterdir())
    second = forks.penteract(["train", f"--resume={run}", "--steps=12"], ENVIRONMENT)
    assert second.returncode == 2, second.stderr
    assert second.stderr.startswith("error[HELD]: another process trains this run") and second.stderr.count("\n") == 1
    assert f"process {process.pid} on " in second.stderr
    assert sorted(p.name for p in run.iterdir()) == before
    process.kill()
    process.join()
    third = forks.penteract(["train", f"--resume={run}", "--steps=12"], ENVIRONMENT)
    assert third.returncode == 0, third.stderr
    assert steps_of(run) == steps_of(whole)
    assert digests(run / "checkpoints" / "step-00000012") == digests(whole / "checkpoints" / "step-00000012")
    assert committed(run / "checkpoints")[0].epoch == 2
    assert {row["epoch"] for row in read_metrics(run / "metrics.jsonl")} == {1, 2}


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    file.write_bytes(data)


def test_ranks_go_back_together_where_one_cannot_read(tmp_path: Path) -> None:
    """A flipped bit in what only rank 1 reads: both take the checkpoint before, and the run ends as if nothing was."""
    done = forks.penteract(
        words(tmp_path, "--steps=8", "--parallel.dp=2", "--checkpoint.keep=0", "--parallel.zero=1"), ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    run = (tmp_path / "latest").resolve()
    before = steps_of(run)
    flip(run / "checkpoints" / "step-00000008" / "rank-00001.safetensors", 0.9)
    done = forks.penteract(["train", f"--resume={run}", "--steps=12"], ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "step-00000008 is damaged, trying the one before" in done.stderr
    assert [step for step, *_ in steps_of(run)] == list(range(1, 13))
    assert steps_of(run)[:8] == before
    assert [p.parent.name for p in (run / "checkpoints").glob("aside-*/*")] == ["aside-000002"]

    shown = forks.penteract(["checkpoints", str(run), "--json"], ENVIRONMENT)
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(shown.stdout)["checkpoints"]
    assert [(row["step"], row["epoch"], row["proven"], row["state"]) for row in rows] == [
        (12, 2, False, "not read"), (8, 2, True, "not read"), (4, 1, True, "not read"),
        (8, 1, False, "set aside by epoch 2"),
    ]  # fmt: skip
    flip(run / "checkpoints" / "step-00000004" / "rank-00000.safetensors", 0.9)
    verified = forks.penteract(["checkpoints", str(run), "--verify"], ENVIRONMENT)
    assert verified.returncode == 65 and "damaged: " in verified.stdout
    pruned = forks.penteract(["checkpoints", str(run), "--prune=1"], ENVIRONMENT)
    assert pruned.returncode == 0 and pruned.stdout.count("removed ") == 2, pruned.stdout + pruned.stderr
    assert [c.step for c in committed(run / "checkpoints")] == [12, 8]
    again = forks.penteract(["train", f"--resume={run}", "--steps=13"], ENVIRONMENT)
    assert again.returncode == 0, again.stderr


def test_a_run_that_is_deleted_says_so(tmp_path: Path) -> None:
    process = forks.start(
        forks._command, words(tmp_path / "runs", "--steps=500"), None,
        environment=ENVIRONMENT, out=tmp_path / "out", err=tmp_path / "err",
    )  # fmt: skip
    latest = tmp_path / "runs" / "latest"
    run = until(lambda: latest.exists() and latest.resolve())
    until(lambda: [c for c in committed(run / "checkpoints") if c.step >= 4])
    os.rename(run, tmp_path / "elsewhere")  # at one moment, so that no file comes back
    shutil.rmtree(tmp_path / "elsewhere")
    process.join(60)
    assert process.exitcode == 74, (tmp_path / "err").read_text()
    assert (tmp_path / "err").read_text().count("error[") == 1
    assert not run.exists()

"""torchrun starts ranks again, whatever they ended with: what another try cannot change is not tried."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import forks
from penteract.engine.runtime.generation import FOLDER, Generation
from penteract.errors import BadNumerics, Preempted

pytestmark = pytest.mark.waits(4)

RUN_ID = "4242"  # a job's number, which it keeps when it is run again


def agent(name: str = "x4k1", attempt: int = 0) -> dict[str, str]:
    """What a torchrun says to its ranks."""
    errors = f"/tmp/torchelastic_{name}/{RUN_ID}_{name}/attempt_{attempt}/0/error.json"
    return {"TORCHELASTIC_RUN_ID": RUN_ID, "TORCHELASTIC_ERROR_FILE": errors}


def generation(out: Path, name: str = "x4k1", attempt: int = 0) -> Generation:
    made = Generation.of(agent(name, attempt), out)
    assert made is not None
    return made


def test_a_final_code_ends_the_next_generation(tmp_path: Path) -> None:
    generation(tmp_path).leave(73, tmp_path / "run")
    error = generation(tmp_path, attempt=1).ended()
    assert isinstance(error, BadNumerics)
    assert str(error) == (
        f"error[ENDED]: the run ended with 73 before torchrun started it again · {tmp_path / 'run'} · "
        f"found run id {RUN_ID} · fix: torchrun --max-restarts 0 tries once"
    )
    generation(tmp_path, attempt=1).leave(75, tmp_path / "run")  # the first stays
    assert isinstance(generation(tmp_path, attempt=2).ended(), BadNumerics)


def test_a_job_that_is_run_again_may_train(tmp_path: Path) -> None:
    """It has the same run id, but another torchrun."""
    generation(tmp_path).leave(75, tmp_path / "run")
    assert isinstance(generation(tmp_path).ended(), Preempted)
    assert generation(tmp_path, "zz99").ended() is None


@pytest.mark.parametrize("code", [0, 70, 71, 72, -9])
def test_what_another_try_may_change_is_tried(tmp_path: Path, code: int) -> None:
    generation(tmp_path).leave(code, tmp_path / "run")
    assert generation(tmp_path).ended() is None and not (tmp_path / FOLDER).exists()


def test_a_record_that_is_no_record_is_none(tmp_path: Path) -> None:
    one = generation(tmp_path)
    one.path.parent.mkdir()
    for text in ("", "[]", '{"exit_code": 72, "run_dir": ""}', '{"exit_code": 75}', "\0"):
        one.path.write_text(text)
        assert one.ended() is None


def test_old_records_are_removed(tmp_path: Path) -> None:
    generation(tmp_path, "old").leave(75, tmp_path)
    os.utime(generation(tmp_path, "old").path, (1, 1))
    generation(tmp_path).leave(75, tmp_path)
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == [generation(tmp_path).path.name]


def test_without_torchrun_there_is_none(tmp_path: Path) -> None:
    assert Generation.of({"RANK": "0"}, tmp_path) is None


def test_ranks_that_start_again_end_before_they_join(tmp_path: Path) -> None:
    words = ["train", "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--parallel.dp=2",
             "--batch.micro_batch_size=1", "--steps=9", "--optimizer.learning_rate=1000", "--optimizer.clip_norm=0",
             f"--output.folder={tmp_path / 'runs'}"]  # fmt: skip
    for done in forks.ranks([words, words], os.environ | agent()):
        assert done.returncode == 73 and "error[NUMERICS]" in done.stderr
    made = sorted(p.name for p in (tmp_path / "runs").iterdir())
    begun = time.monotonic()
    # The second of two ranks alone: it would wait for the first, if it joined.
    (again,) = forks.ranks([words], os.environ | agent(attempt=1), world=2)
    assert time.monotonic() - begun < 5
    assert again.returncode == 73
    assert again.stderr.startswith("error[ENDED]: the run ended with 73 before torchrun started it again")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == made

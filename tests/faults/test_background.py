"""Saves in the background: killed or failing at every file operation, the old or the new checkpoint loads; training
goes on after one that failed, and ends after two.

Of the file operations a drawn part, and all of them where ALL_CRASH_POINTS is set, as by `make test-faults`.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from faults.background import begun, check_next_save, dying_after, failing_at, noting, points
from penteract.engine.checkpoint import committed, take
from penteract.engine.checkpoint.packing import LARGEST_FILE
from penteract.engine.session.background.save_rows import SaveRows
from penteract.engine.session.checkpoints import ReadBack
from penteract.errors import BadNumerics, DiskFailure

WHOLE, IN_FILES = LARGEST_FILE, 2**16  # the small model's share is one file, or six
BEFORE = [([(10, 1.0)], 20, WHOLE), ([(5, 9.0), (10, 1.0)], 20, WHOLE), ([(10, 1.0)], 10, WHOLE),
          ([(5, 9.0), (10, 1.0)], 20, IN_FILES)]  # fmt: skip
NAMES = ["the next", "two, one goes", "the same step again", "in several files"]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(points: list[int], most: int = 4) -> list[int]:
    """The points that are tried: the first, the last four, after which the save is whole, and some in between."""
    if "ALL_CRASH_POINTS" in os.environ:
        return points
    between = points[1:-4]
    return [points[0], *sorted(random.Random(20261125).sample(between, min(most, len(between)))), *points[-4:]]


@pytest.mark.parametrize(("before", "step", "largest"), BEFORE, ids=NAMES)
def test_the_writer_is_killed_at_each_file_operation(
    tmp_path: Path, before: list[tuple[int, float]], step: int, largest: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen, old = set[float](), before[-1]
    one = begun(tmp_path / "whole", before, largest)
    one.save(step, 77.0, noting(tmp_path / "log"))
    one.close()
    counts = points(tmp_path / "log")
    for count in drawn(counts):
        one = begun(tmp_path / str(count), before, largest)
        caplog.clear()
        assert one.save(step, 77.0, dying_after(count)).killed
        is_new = one.checkpoints.last == step and one.read() == (step, 77.0)
        assert is_new or one.read() == old, f"after {count}"
        assert is_new or one.saves.failures == 1
        assert sum("training goes on" in r.message for r in caplog.records) == one.saves.failures
        seen.add(one.read()[1])
        check_next_save(one, step + 10)
    assert seen == {old[1], 77.0}
    assert len(counts) > 15


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_every_operation_of_the_writer_fails_once(tmp_path: Path, error: int) -> None:
    """The run ends with 74, as after a save at once, or the save is whole."""
    one = begun(tmp_path / "whole", [(5, 9.0), (10, 1.0)])
    one.save(20, 77.0, noting(tmp_path / "log", error))
    one.close()
    refused = 0
    for count in drawn(points(tmp_path / "log"), 3):
        one = begun(tmp_path / str(count), [(5, 9.0), (10, 1.0)])
        try:
            one.save(20, 77.0, failing_at(count, error))
            failed = False
        except DiskFailure as e:
            assert e.exit_code == 74
            failed = True
        assert one.read() == (20, 77.0) or (one.read() == (10, 1.0) and failed), count
        refused += failed
        check_next_save(one, 30)
    assert refused > 3


def test_two_writers_in_a_row_end_the_run(tmp_path: Path) -> None:
    one = begun(tmp_path, [(10, 1.0)])
    assert one.save(20, 2.0, dying_after(0)).killed
    one.save(30, 3.0)
    assert one.save(40, 4.0, dying_after(0)).killed  # not in a row
    with pytest.raises(DiskFailure, match="so was the one before") as failed:
        one.save(50, 5.0, dying_after(0))
    assert failed.value.exit_code == 74
    assert one.read() == (30, 3.0)
    one.close()


def test_state_that_is_not_finite_is_not_committed(tmp_path: Path) -> None:
    one = begun(tmp_path, [(10, 1.0)])
    with pytest.raises(BadNumerics, match="nothing of this step is saved"):
        one.save(20, float("nan"))
    assert one.read() == (10, 1.0)
    one.close()


def test_after_a_takeover_the_one_before_cannot_commit(tmp_path: Path) -> None:
    """Also where it comes between the writing and the commit."""
    one, table = begun(tmp_path, [(10, 1.0)]), SaveRows.table

    def taken(self: SaveRows, *about: int) -> str:
        take(one.folder, 2)
        return table(self, *about)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(DiskFailure) as failed:
        patched.setattr(SaveRows, "table", taken)
        one.save(20, 2.0)
    assert failed.value.exit_code == 74
    assert one.read() == (10, 1.0)
    with pytest.raises(DiskFailure, match="taken this run over"):
        one.saves.start(30, {"step": 30})
    assert [c.step for c in committed(one.folder)] == [10]
    one.close()


def test_the_newest_proven_step_stays_and_nothing_goes_on_an_errors_path(tmp_path: Path) -> None:
    one = begun(tmp_path, [])
    one.save_at_once(10, 1.0, proven=False)
    for step in (20, 30, 40):
        one.save(step, float(step))
    assert [(c.step, c.proven) for c in committed(tmp_path)] == [(40, False), (30, True)]
    one.fill(50.0)
    one.saves.start(50, {"step": 50})
    one.saves.finish(prune=False)
    assert [(c.step, c.proven) for c in committed(tmp_path)] == [(50, False), (40, False), (30, True)]
    one.close()


@pytest.mark.parametrize(
    "file", ["rank-00000.safetensors", "rank-00000-00003.safetensors", "rectangles.bin", "manifest.json"]
)
def test_a_step_that_was_not_written_as_said_is_not_proven(tmp_path: Path, file: str) -> None:
    one = begun(tmp_path, [], IN_FILES)
    one.save(10, 1.0)
    one.save(20, 2.0)
    read = one.checkpoints.before
    assert read is not None and read.read_back is not None
    saved = read.read_back
    saved.result()
    path = tmp_path / "step-00000020" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = ReadBack(saved.at, saved.table, whole=saved.whole)  # the page was lost before it was read
    one.checkpoints.commit_seen(again)
    one.save(30, 3.0)
    assert [(c.step, c.proven) for c in committed(tmp_path)] == [(30, False), (20, False), (10, True)]
    one.close()


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    one = begun(tmp_path, [(10, 1.0)])
    held = list[tuple[int, int, int, int]]()
    for step in range(20, 170, 5):
        one.fill(float(step))
        one.saves.start(step, {"step": step})
        one.saves.finish()
        one.checkpoints.close()
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), _children(), len(one.saves.rows._own)))
    assert len(set(held[5:])) == 1, held
    assert one.read() == (165, 165.0)
    one.close()
    assert _children() == held[-1][2] - 1


def _children() -> int:
    found = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            found += len((task / "children").read_text().split())
    return found

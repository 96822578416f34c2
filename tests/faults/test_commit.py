"""Stop a save at each of its file operations, or let one fail: a reader sees the old checkpoint or the new, whole."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.shards import load_whole, same, save_all, save_whole
from faults.crash_points import Crash, crash_after, fail_at
from penteract.engine.checkpoint import (
    Slice,
    committed,
    durable,
    end_epoch,
    latest,
    prove,
    prune,
    set_aside,
    take,
    verify,
    writing,
)
from penteract.engine.checkpoint.folder import work_folder
from penteract.errors import CorruptData, DiskFailure

SHAPE = (4, 3)
IN_THREE_FILES = 0  # in the place of how many ranks save
SAVES = [
    ([(10, 1)], 20, 2, 1),
    ([(10, 1)], 20, 1, 1),
    ([(10, 1), (20, 2)], 30, 1, 1),
    ([(10, 1)], 10, 1, 1),
    ([(5, 9), (10, 1)], 10, 2, 1),
    ([(10, 1), (20, 2)], 30, 1, 2),
    ([(10, 1), (20, 2)], 30, 1, IN_THREE_FILES),
]
NAMES = ["the next", "the next, one is kept", "two, one goes", "the same step again", "the same of two", "by two ranks",
         "in three files"]  # fmt: skip


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full(SHAPE, float(value)), "w/mean": torch.full((2,), float(-value))}


def save_by(world: int, folder: Path, step: int, value: int, keep: int) -> None:
    """By ranks of which each owns a tensor, or by one: into a file, or into three."""
    tensors = [[Slice(name, tuple(t.shape), (0,) * t.dim(), t)] for name, t in state(value).items()]
    with pytest.MonkeyPatch.context() as patched:
        if world == IN_THREE_FILES:
            patched.setattr(writing, "LARGEST_FILE", 128)
        save_all(folder, step, tensors if world == 2 else [tensors[0] + tensors[1]], keep=keep)


def start(folder: Path, before: list[tuple[int, int]]) -> None:
    for step, value in before:
        save_whole(folder, step, state(value))
        prove(latest(folder))


@pytest.mark.parametrize(("before", "step", "keep", "world"), SAVES, ids=NAMES)
def test_every_crash_point(tmp_path: Path, before: list[tuple[int, int]], step: int, keep: int, world: int) -> None:
    old, new = state(before[-1][1]), state(77)
    seen, count = set[bool](), 0
    while True:
        folder = tmp_path / str(count)
        start(folder, before)
        with pytest.MonkeyPatch.context() as patched:
            happened = crash_after(patched, count)
            try:
                save_by(world, folder, step, 77, keep)
                done = True
            except Crash:
                done = False
        read = load_whole(latest(folder), old)
        assert same(read, new) or (same(read, old) and not done), f"after {happened}"
        seen.add(same(read, new))
        check_next_save(folder, step + 10, keep)
        if done:
            break
        count += 1
    assert seen == {True, False}
    assert count > 20


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize(("before", "step", "keep", "world"), SAVES, ids=NAMES)
def test_every_operation_fails_once(
    tmp_path: Path, before: list[tuple[int, int]], step: int, keep: int, world: int, error: int
) -> None:
    old, new = state(before[-1][1]), state(77)
    count, failures = 0, 0
    while True:
        folder = tmp_path / str(count)
        start(folder, before)
        with pytest.MonkeyPatch.context() as patched:
            failed = fail_at(patched, count, error, lasting=error == errno.EROFS)
            try:
                save_by(world, folder, step, 77, keep)
                refused = False
            except (DiskFailure, OSError):  # the caller names the folder where pruning fails
                refused = True
        read = load_whole(latest(folder), old)
        assert same(read, new) or (same(read, old) and refused), f"{failed} of {count}"
        failures += refused
        check_next_save(folder, step + 10, keep)
        if not failed:
            break
        count += 1
    assert failures > 5


def check_next_save(folder: Path, step: int, keep: int) -> None:
    """It tidies up."""
    save_whole(folder, step, state(88), keep=keep)
    assert same(load_whole(latest(folder), state(0)), state(88))
    assert not [p for p in folder.iterdir() if not p.name.startswith("step-") and p.name != "latest"]
    assert not list(folder.glob("*.old"))


def test_each_file_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = crash_after(monkeypatch, 10**6)
    save_whole(tmp_path, 1, state(1))
    commit = happened.index("rename")
    assert happened[:commit].count("fsync") == 5  # tensors, their table, rectangles, the manifest, the folder
    assert happened[commit + 1 :][:2] == ["open", "fsync"]  # the folder above


def test_a_large_file_is_synced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "LARGE", 1)
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    synced, before = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        before(fd)
        synced.set()

    def waiting() -> Iterator[bytes]:
        yield b"first"
        assert synced.wait(20)  # before the last byte is there
        yield b"last"

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    parts = [durable.Part(0, [b"head"]), durable.Part(4, waiting())]
    assert durable.write_parts(tmp_path / "file", parts, 13, threads=2) == 13
    assert (tmp_path / "file").read_bytes() == b"headfirstlast"


def test_an_error_of_an_early_sync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tells of it only once: the sync at the end would find nothing."""
    monkeypatch.setattr(durable, "LARGE", 1)
    monkeypatch.setattr(durable, "_PAUSE_S", 0.0)
    failed = threading.Event()

    def fdatasync(_: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    def waiting() -> Iterator[bytes]:
        assert failed.wait(20)
        yield b"all"

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError, match="Input/output"):
        durable.write_parts(tmp_path / "file", [durable.Part(0, waiting())], 3)


def test_files_that_are_full_before_the_last_leave_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, [(10, 1)])
    before, written = os.fsync, list[int]()

    def fsync(fd: int) -> None:
        written.append(fd)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        before(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskFailure):
        save_by(IN_THREE_FILES, tmp_path, 20, 77, 0)
    assert not list(tmp_path.rglob("work-*/step-*/*"))
    monkeypatch.setattr(os, "fsync", before)
    save_by(IN_THREE_FILES, tmp_path, 20, 77, 0)
    names = sorted(file.name for file in latest(tmp_path).glob("*.safetensors"))
    assert names == ["rank-00000-00001.safetensors", "rank-00000-00002.safetensors", "rank-00000.safetensors"]
    for name in names:
        file = latest(tmp_path) / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptData, match=name):
            verify(file.parent)
        file.unlink()
        assert latest(tmp_path).name == "step-00000010"
        file.write_bytes(whole)
    assert same(load_whole(latest(tmp_path), state(0)), state(77))


def test_a_stale_unfinished_save_never_mixes_in(tmp_path: Path) -> None:
    stale = work_folder(tmp_path, 0) / "step-00000007"
    stale.mkdir(parents=True)
    (stale / "rank-00001.json").write_text('{"files": {}, "tensors": {}}')
    (stale / "rank-00001.safetensors").write_bytes(b"old")
    at = save_all(tmp_path, 7, [[Slice("w", (2,), (r,), torch.ones(1))] for r in range(2)])
    assert same(load_whole(at, {"w": torch.zeros(2)}), {"w": torch.ones(2)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_a_rank_that_fails_commits_nothing(tmp_path: Path) -> None:
    def lost() -> Any:
        yield Slice("w", (2,), (1,), torch.ones(1))
        raise Crash

    start(tmp_path, [(1, 1)])
    with pytest.raises(Crash):
        save_all(tmp_path, 2, [[Slice("w", (2,), (0,), torch.ones(1))], lost()])
    assert latest(tmp_path).name == "step-00000001"


def test_keep(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_whole(tmp_path, step, state(step))
    assert len(list(tmp_path.glob("step-*"))) == 5
    (tmp_path / "step-00000004" / "manifest.json").unlink()  # damaged: does not count
    save_whole(tmp_path, 6, state(6), keep=3)
    assert len(list(tmp_path.glob("step-*"))) == 6  # none is proven: all stay
    prove(tmp_path / "step-00000005")
    prune(tmp_path, 3)
    assert sorted(p.name[-1] for p in tmp_path.glob("step-*")) == ["3", "4", "5", "6"]
    save_whole(tmp_path, 7, state(7), keep=1)
    assert sorted(p.name[-1] for p in tmp_path.glob("step-*")) == ["5", "6", "7"]  # back to the newest proven one
    prove(tmp_path / "step-00000007")
    prune(tmp_path, 1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000007"]


# ---- epochs ----------------------------------------------------------------------------------------------------------


def every_crash_point(make: Callable[[Path], None], work: Callable[[Path], None], at: Path) -> list[Path]:
    """Folders in which `work` was killed after each of its file operations, the last in which it was not."""
    folders = list[Path]()
    while True:
        folders.append(folder := at / str(len(folders)))
        make(folder)
        with pytest.MonkeyPatch.context() as patched:
            crash_after(patched, len(folders) - 1)
            try:
                work(folder)
                return folders
            except Crash:
                continue


def ten_by_epoch_one(folder: Path) -> None:
    take(folder, 1)
    save_all(folder, 10, [[Slice("w", (2,), (0,), torch.ones(2))]], epoch=1)


def test_after_a_takeover_the_one_before_cannot_commit(tmp_path: Path) -> None:
    """A holder that was only slow: everything of its save is written, but not committed yet."""
    for folder in every_crash_point(ten_by_epoch_one, lambda folder: take(folder, 2), tmp_path):
        take(folder, 3)  # if the second was killed, a third comes
        before = sorted(p.name for p in folder.rglob("*"))
        with pytest.raises(DiskFailure) as failed:
            save_all(folder, 20, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=1)
        assert failed.value.exit_code == 74
        assert sorted(p.name for p in folder.rglob("*")) == before
        save_all(folder, 20, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=3)
        assert latest(folder).name == "step-00000020"


def test_an_epoch_that_ended_well_leaves_no_folder_and_still_bars_those_before(tmp_path: Path) -> None:
    one = [[Slice("w", (2,), (0,), torch.ones(2))]]
    for folder in every_crash_point(ten_by_epoch_one, lambda folder: take(folder, 2), tmp_path):
        take(folder, 2)
        end_epoch(folder, 2)
        assert work_folder(folder, 2).is_dir()  # it has saved nothing: only its folder shows that it was there
        save_all(folder, 20, one, epoch=2)
        end_epoch(folder, 2)
        assert not list(folder.glob("work-*"))
        with pytest.raises(DiskFailure):  # one that was slow to begin
            take(folder, 1)
        for late in (1, 2):
            with pytest.raises(DiskFailure):
                save_all(folder, 30, one, epoch=late)
        assert latest(folder).name == "step-00000020"
        take(folder, 3)
        save_all(folder, 30, one, epoch=3)
        assert latest(folder).name == "step-00000030"


def test_a_takeover_while_the_one_before_leaves(tmp_path: Path) -> None:
    count = 0
    while True:
        folder = tmp_path / str(count)
        ten_by_epoch_one(folder)
        left = list[int]()

        def leave_now(folder: Path = folder, left: list[int] = left) -> None:
            left.append(1)
            end_epoch(folder, 1)

        with pytest.MonkeyPatch.context() as patched:
            interrupt_after(patched, count, leave_now)
            take(folder, 2)
        save_all(folder, 20, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=2)
        assert latest(folder).name == "step-00000020"
        if not left:
            break
        count += 1
    assert count > 2


def test_a_takeover_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Between any two operations of the first: then its step is whole, or it is not there."""
    count = 0
    while True:
        folder = tmp_path / str(count)
        ten_by_epoch_one(folder)
        taken = list[int]()
        with pytest.MonkeyPatch.context() as patched:
            happened = list[str]()

            def take_over(folder: Path = folder, taken: list[int] = taken) -> None:
                taken.append(2)
                with pytest.MonkeyPatch.context():
                    take(folder, 2)

            happened = interrupt_after(patched, count, take_over)
            try:
                save_all(folder, 20, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=1)
                refused = False
            except DiskFailure:
                refused = True
        assert latest(folder).name in ("step-00000010", "step-00000020")
        assert refused or latest(folder).name == "step-00000020", happened
        load_whole(latest(folder), {"w": torch.zeros(2)})
        if not taken:
            break
        count += 1
    assert count > 15


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[], None]) -> list[str]:
    """Another process does `work` after `count` operations of this one."""
    from faults import crash_points

    happened, inside = list[str](), [False]

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if len(happened) == count and not inside[0]:
            inside[0] = True
            monkeypatch.undo()
            work()

    happened = crash_points._patched(monkeypatch, before)
    return happened


def test_going_back(tmp_path: Path) -> None:
    """Killed at any operation: the run goes on from a step that is whole, and steps gone back from never return."""

    def make(folder: Path) -> None:
        take(folder, 1)
        for step in (10, 20, 30):
            save_all(folder, step, [[Slice("w", (2,), (0,), torch.full((2,), float(step)))]], epoch=1)

    for folder in every_crash_point(make, lambda f: (take(f, 2), set_aside(f, f / "step-00000010", 2))[0], tmp_path):
        newest = latest(folder)
        load_whole(newest, {"w": torch.zeros(2)})
        take(folder, 3)
        set_aside(folder, folder / "step-00000010", 3)
        assert [c.step for c in committed(folder)] == [10]
        assert (folder / "latest").read_text() == "step-00000010\n"
        save_all(folder, 20, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=3)
        assert latest(folder).name == "step-00000020"
        assert len(list(folder.glob("aside-*/step-*"))) == 2


def test_the_order_is_that_of_epochs(tmp_path: Path) -> None:
    take(tmp_path, 1)
    save_all(tmp_path, 30, [[Slice("w", (2,), (0,), torch.zeros(2))]], epoch=1)
    take(tmp_path, 2)
    save_all(tmp_path, 20, [[Slice("w", (2,), (0,), torch.ones(2))]], epoch=2)
    assert [(c.epoch, c.step) for c in committed(tmp_path)] == [(2, 20), (1, 30)]
    assert latest(tmp_path).name == "step-00000020"
    (tmp_path / "step-00000020" / "rank-00000.safetensors").unlink()
    assert latest(tmp_path).name == "step-00000030"
    with pytest.raises(CorruptData):
        load_whole(tmp_path / "step-00000020", {"w": torch.zeros(2)})

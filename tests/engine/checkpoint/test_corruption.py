"""Damage is noticed: no bit that counts can change between save and load."""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.shards import load_whole, noise, same, save_all, save_whole
from penteract.engine.checkpoint import Slice, check, committed, latest, load, reading, take, verify
from penteract.engine.checkpoint.durable import Room, write
from penteract.engine.checkpoint.reading import checked
from penteract.errors import BadInput, CorruptData, DiskFailure, PenteractError

TENSORS = {"w": noise((7, 5), torch.float32, 1), "b": noise((9,), torch.bfloat16, 2)}


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    at = save_whole(tmp_path / "a", 3, TENSORS)
    found = tried = 0
    for name in ("rank-00000.safetensors", "manifest.json", "rectangles.bin"):
        path = at / name
        clean, dice = path.read_bytes(), random.Random(5)
        for bit in dice.sample(range(len(clean) * 8), 120):
            flipped(path, bit)
            try:
                assert same(load_whole(at, TENSORS), TENSORS)  # in the white space of a header, say
            except CorruptData:
                found += 1
            tried += 1
            path.write_bytes(clean)
    assert found > 0.75 * tried
    assert same(load_whole(at, TENSORS), TENSORS)


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_a_flip_in_any_element_of_a_tensor_is_found(tmp_path: Path, bit: int) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    path = at / "rank-00000.safetensors"
    kernel = path.stat().st_size - sum(t.nbytes for t in TENSORS.values())
    for element in range(35):
        flipped(path, (kernel + 4 * element) * 8 + bit)
        with pytest.raises(CorruptData, match=r"rank-00000\.safetensors · found w: its bytes"):
            load_whole(at, TENSORS)
        flipped(path, (kernel + 4 * element) * 8 + bit)
    verify(at)


def test_of_many_tensors_read_at_once_the_damaged_one_is_named(tmp_path: Path) -> None:
    """Few are read ahead of the one that is copied, and none is left to do when one is damaged."""
    tensors = {f"{n:02d}": noise((1000,), torch.float32, n) for n in range(24)}
    at = save_whole(tmp_path, 1, tensors)
    assert same(load_whole(at, tensors, threads=4), tensors)
    path, before, asked = at / "rank-00000.safetensors", threading.active_count(), list[Any]()

    def counted(*about: Any) -> torch.Tensor:
        asked.append(about)
        return checked(*about)

    begins = path.stat().st_size - sum(t.nbytes for t in tensors.values())
    flipped(path, (begins + 13 * 4000) * 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "checked", counted)
        patched.setattr(reading, "_AHEAD", 5 * 4000)
        with pytest.raises(CorruptData, match=r"rank-00000\.safetensors · found 13: its bytes"):
            load_whole(at, tensors, threads=4)
        assert len(asked) <= 14 + 5
        asked.clear()
        with pytest.raises(RuntimeError):  # what cannot be copied to
            load(at, [Slice(n, t.shape, (0,), torch.zeros(1).expand(1000) if n == "02" else t.clone())
                      for n, t in tensors.items()], threads=4)  # fmt: skip
        assert len(asked) <= 3 + 5
    assert threading.active_count() == before


def test_a_file_of_another_rank_or_save_is_found(tmp_path: Path) -> None:
    halves = [[Slice("w", (4,), (2 * r,), torch.full((2,), float(r)))] for r in range(2)]
    at = save_all(tmp_path, 1, halves)
    shutil.copy(at / "rank-00001.safetensors", at / "rank-00000.safetensors")
    with pytest.raises(CorruptData, match="rank-00000"):
        load_whole(at, {"w": torch.zeros(4)})
    with pytest.raises(CorruptData, match="rank-00000"):
        verify(at)


@pytest.mark.parametrize("name", ["manifest.json", "rectangles.bin", "rank-00000.safetensors"])
@pytest.mark.parametrize("left", [None, 0, 7, -1])
def test_a_damaged_step_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, left: int | None
) -> None:
    old, new = (save_whole(tmp_path, step, TENSORS) for step in (10, 20))
    path = new / name
    path.unlink() if left is None else os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with caplog.at_level(logging.WARNING, "penteract"):
        assert latest(tmp_path) == old
    assert "step-00000020 is damaged" in caplog.text
    shutil.rmtree(old)
    with pytest.raises(BadInput, match=r"no intact checkpoint.*found damaged step-00000020"):
        latest(tmp_path)


def test_a_truncated_file_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    path = at / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptData, match=r"rank-00000\.safetensors · found b: "):
        load(at, [Slice("b", (9,), (0,), torch.zeros(9, dtype=torch.bfloat16))])


@pytest.mark.parametrize("pointer", ["", "release", "\0\0", "step-00000099\n"])
def test_the_pointer_is_only_for_people(tmp_path: Path, pointer: str) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    (tmp_path / "latest").write_text(pointer)
    assert latest(tmp_path) == at


def test_no_room_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save_whole(tmp_path, 1, TENSORS)
    monkeypatch.setattr("penteract.engine.checkpoint.durable.room", lambda folder: Room(100, None))
    with pytest.raises(DiskFailure, match="no room") as caught:
        save_whole(tmp_path, 2, TENSORS)
    assert caught.value.exit_code == 74
    assert latest(tmp_path) == old


def test_a_disk_that_fills_leaves_the_old_one_and_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save_whole(tmp_path, 1, TENSORS)
    before = os.pwritev

    def full(fd: int, buffers: list[memoryview], at: int) -> int:
        if len(buffers[0]) == 140:  # the first tensor
            raise OSError(28, "No space left on device")
        return before(fd, buffers, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(DiskFailure, match="No space left"):
            save_whole(tmp_path, 2, TENSORS)
    assert latest(tmp_path) == old
    assert not list(tmp_path.glob("work-*/step-00000002/*.safetensors"))
    assert save_whole(tmp_path, 2, TENSORS) == latest(tmp_path)


def test_a_folder_that_cannot_be_is_a_disk_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure):
        save_whole(tmp_path / "file" / "checkpoints", 1, TENSORS)
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space"):
            write(Path("/dev/full"), [b"x"])


def test_loading_runs_nothing(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 1, TENSORS)
    marker = tmp_path / "ran"
    (at / "rank-00000.safetensors").write_bytes(f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(PenteractError):
        load(at, [Slice("b", (9,), (0,), torch.zeros(9, dtype=torch.bfloat16))])
    assert not marker.exists()


def test_a_step_in_the_folder_of_another_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An old step must not become the newest."""
    old, new = (save_whole(tmp_path, step, TENSORS) for step in (10, 20))
    shutil.copytree(old, tmp_path / "step-00000030")
    with caplog.at_level(logging.WARNING, "penteract"):
        assert latest(tmp_path) == new
    assert "step-00000030 is damaged, trying the one before: a step has the folder of another step 10" in caplog.text


@pytest.mark.parametrize("text", ["2 {}\n", "2 \n", "2", "\0", "", "1 0123456789abcdef\n", "9 {}\n", "-2\n", "2\n\n"])
def test_an_epoch_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Steps of later epochs are newer, so one flipped bit could make a run go back."""
    take(tmp_path, 1)
    old = save_whole(tmp_path, 10, TENSORS, epoch=1)
    new = save_whole(tmp_path, 20, TENSORS, epoch=1)
    first, _, rest = (old / "epoch").read_text().partition(" ")
    assert first == "1" and [c.epoch for c in committed(tmp_path)] == [1, 1]
    (old / "epoch").write_text(text.format(rest.strip()))
    with caplog.at_level(logging.WARNING, "penteract"):
        assert latest(tmp_path) == new
        with pytest.raises(CorruptData, match="its epoch is damaged"):
            check(old)


def test_epochs_of_the_first_versions_are_read(tmp_path: Path) -> None:
    at = save_whole(tmp_path, 10, TENSORS)
    (at / "epoch").write_text("3\n")
    check(at)
    assert [c.epoch for c in committed(tmp_path)] == [3]

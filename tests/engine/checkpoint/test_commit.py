"""Stop a save after each of its file operations: a reader sees the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.shards import load_whole, same, save_all, save_whole
from penteract.engine.checkpoint import Slice, latest

OPERATIONS = ("open", "write", "fsync", "close", "rename", "replace", "mkdir", "unlink", "rmdir")
SHAPE = (4, 3)


class Crash(BaseException):
    """The process is gone: not an Exception, so that nothing tidies up."""


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full(SHAPE, float(value)), "w/mean": torch.full((2,), float(-value))}


def crash_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let `count` file operations happen, then nothing more; returns the log of what happened."""
    happened: list[str] = []

    def limited(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            if len(happened) >= count:
                raise Crash
            happened.append(name)
            return real(*args, **named)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, limited(name, getattr(os, name)))
    return happened


def start(folder: Path, before: list[tuple[int, int]], keep: int) -> None:
    for step, value in before:
        save_whole(folder, step, state(value), keep=keep)


@pytest.mark.parametrize(
    ("before", "step", "keep"),
    [
        ([(10, 1)], 20, 2),
        ([(10, 1)], 20, 1),
        ([(10, 1), (20, 2)], 30, 1),
        ([(10, 1)], 10, 1),
        ([(5, 9), (10, 1)], 10, 2),
    ],
    ids=["the next", "the next, one is kept", "two go", "the same step again", "the same of two"],
)
def test_every_crash_point(tmp_path: Path, before: list[tuple[int, int]], step: int, keep: int) -> None:
    old, new = state(before[-1][1]), state(77)
    seen, count = set[bool](), 0
    while True:
        folder = tmp_path / str(count)
        start(folder, before, keep)
        with pytest.MonkeyPatch.context() as patched:
            happened = crash_after(patched, count)
            try:
                save_whole(folder, step, new, keep=keep)
                done = True
            except Crash:
                done = False
        read = load_whole(latest(folder), old)
        assert same(read, new) or (same(read, old) and not done), f"after {happened}"
        seen.add(same(read, new))
        save_whole(folder, step + 10, state(88), keep=keep)  # the next save tidies up
        assert same(load_whole(latest(folder), old), state(88))
        assert not [p for p in folder.iterdir() if p.suffix in (".tmp", ".old")]
        if done:
            break
        count += 1
    assert seen == {True, False}
    assert count > 20


def test_each_file_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = crash_after(monkeypatch, 10**6)
    save_whole(tmp_path, 1, state(1))
    commit = happened.index("rename")
    assert happened[:commit].count("fsync") == 4  # tensors, their table, the manifest, the folder
    assert happened[commit + 1 :][:2] == ["open", "fsync"]  # the folder above


def test_a_stale_unfinished_save_never_mixes_in(tmp_path: Path) -> None:
    stale = tmp_path / "step-00000007.tmp"
    stale.mkdir()
    (stale / "rank-00001.json").write_text('{"size": 0, "tensors": {}}')
    (stale / "rank-00001.safetensors").write_bytes(b"old")
    at = save_all(tmp_path, 7, [[Slice("w", (2,), (r,), torch.ones(1))] for r in range(2)])
    assert same(load_whole(at, {"w": torch.zeros(2)}), {"w": torch.ones(2)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_a_rank_that_fails_commits_nothing(tmp_path: Path) -> None:
    def lost() -> Any:
        yield Slice("w", (2,), (1,), torch.ones(1))
        raise Crash

    start(tmp_path, [(1, 1)], 2)
    with pytest.raises(Crash):
        save_all(tmp_path, 2, [[Slice("w", (2,), (0,), torch.ones(1))], lost()])
    assert latest(tmp_path).name == "step-00000001"


def test_keep(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_whole(tmp_path, step, state(step), keep=0)
    assert len(list(tmp_path.glob("step-*"))) == 5
    (tmp_path / "step-00000004" / "manifest.json").unlink()  # damaged: does not count
    save_whole(tmp_path, 6, state(6), keep=3)
    assert sorted(p.name[-1] for p in tmp_path.glob("step-*")) == ["3", "4", "5", "6"]
    save_whole(tmp_path, 7, state(7), keep=1)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000007"]

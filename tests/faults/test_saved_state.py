"""What is saved is finite and can be read; what could be lost is not removed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draws import further
from penteract.config.resolve.resolved_run import resolve
from penteract.engine import checkpoint
from penteract.engine.checkpoint import committed, latest, verify
from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint.durable import Room
from penteract.engine.device.device import Cpu
from penteract.engine.rank.rank import Rank
from penteract.engine.session.saved import saved_bytes
from penteract.engine.session.session import Session, SessionOptions
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadNumerics, CorruptData, DiskFailure


@pytest.fixture(autouse=True, params=[False, True], ids=["at once", "a step late"])
def behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether outcomes are read when the next step is under way, as on a GPU."""
    monkeypatch.setattr(Cpu, "behind", request.param)
    return request.param


def session(folder: Path, *words: str, resume: bool = False) -> Session:
    plain = ("--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=2",
             "--checkpoint.asynchronous=false")  # fmt: skip
    small = ("--model.layers=1", "--batch.sequence_length=64", "--batch.global_batch_size=2",
             "--batch.micro_batch_size=1")  # fmt: skip
    run = resolve(None, "tiny", [f"--output.folder={folder}", *plain, *small, *words], world=1).run
    rank = Rank(0, 1, torch.device("cpu"), None)
    if resume:
        (folder / "run.next.toml").touch()
    made = Session(run, rank, SessionOptions(folder, resume=folder if resume else None))
    made.open()
    return made


def steps(folder: Path) -> list[int]:
    return sorted(c.step for c in committed(folder / "checkpoints"))


def weights(made: Session) -> list[torch.Tensor]:
    return [flat.master.clone() for flat in made.trainer.state.flats]


def at_step(number: int, do: Callable[[Trainer], None]) -> pytest.MonkeyPatch:
    """Do something right before a step begins."""
    patch, start = pytest.MonkeyPatch(), Trainer.start

    def begun(self: Trainer, n: int, *about: object) -> object:
        if n == number:
            do(self)
        return start(self, n, *about)  # type: ignore[arg-type]

    patch.setattr(Trainer, "start", begun)
    return patch


BAD = [(5, 1, "false"), (5, 3, "true"), (6, 1, "true"), (6, 3, "false")]  # each with each of the others
FURTHER = [(5, 3, "false"), (5, 1, "true"), (6, 3, "true"), (6, 1, "false")]


@pytest.mark.parametrize(("bad", "keep", "background"), [*BAD, *further(FURTHER)])
def test_an_update_that_makes_bad_weights_is_never_saved(tmp_path: Path, bad: int, keep: int, background: str) -> None:
    """Its gradient was finite, and a step later the loss is not. The bad step may be one that is due to be saved."""
    made = session(
        tmp_path, "--training.steps=20", f"--checkpoint.keep={keep}", f"--checkpoint.asynchronous={background}"
    )
    rate = Trainer.rate
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BadNumerics) as failed:
        patched.setattr(Trainer, "rate", lambda self, n: float("inf") if n == bad else rate(self, n))
        made.go()
    assert failed.value.exit_code == 73
    held = steps(tmp_path)
    # Two is proven, four not yet. In the background, the save of two may still have been under way at step four.
    assert held == [2, 4] or (background == "true" and held == [2])
    for one in committed(tmp_path / "checkpoints"):
        verify(one.at)
    again = session(tmp_path, "--training.steps=8", f"--checkpoint.keep={keep}", resume=True)
    assert again.first == held[-1] + 1
    again.go()
    assert steps(tmp_path)[-1] == 8


def test_what_no_update_made_is_found_by_the_writer(tmp_path: Path) -> None:
    """A flipped exponent in a weight that no token of the next steps reads."""
    made = session(tmp_path, "--training.steps=8")

    def spoil(trainer: Trainer) -> None:
        next(trainer.state.parameter_parts("square")).values[-1] = float("inf")

    patch = at_step(4, spoil)
    try:
        with pytest.raises(BadNumerics, match="nothing of this step is saved") as failed:
            made.go()
    finally:
        patch.undo()
    assert "/square" in failed.value.where
    assert steps(tmp_path) == [2]


def test_one_proven_step_always_stays(tmp_path: Path) -> None:
    session(tmp_path, "--training.steps=8", "--checkpoint.keep=1").go()
    found = committed(tmp_path / "checkpoints")
    assert [(c.step, c.proven) for c in found] == [(8, False), (6, True)]


def test_a_step_that_was_not_written_as_said_is_not_proven(tmp_path: Path) -> None:
    """The disk lost a page of step 4 after it was synced."""

    def flip(trainer: Trainer) -> None:
        file = tmp_path / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    made = session(tmp_path, "--training.steps=8", "--checkpoint.keep=1")
    read = made.checkpoints._prove
    before = list[int]()

    def prove(self: object = None) -> None:
        if not before and made.checkpoints.last == 6:
            before.append(6)
            flip(made.trainer)
            written = made.checkpoints._written
            assert written is not None and written.at.name.endswith("4")
            again = type(written)(written.at, written.table, whole=written.whole)  # the page is lost before it is read
            made.checkpoints._written = again
        read()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(made.checkpoints), "_prove", prove)
        made.go()
    assert [(c.step, c.proven) for c in committed(tmp_path / "checkpoints")] == [(8, False), (6, True)]


def test_a_damaged_step_is_set_aside_and_nothing_of_it_stays(tmp_path: Path) -> None:
    whole = session(tmp_path / "whole", "--training.steps=6")
    whole.go()
    session(tmp_path / "run", "--training.steps=5", "--checkpoint.keep=0").go()
    assert steps(tmp_path / "run") == [2, 4, 5]
    for step in (4, 5):
        file = tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-1 if step == 5 else len(data) // 2] ^= 64
        file.write_bytes(data)
    again = session(tmp_path / "run", "--training.steps=6", resume=True)
    assert again.first == 3
    assert steps(tmp_path / "run") == [2]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("aside-*/*")) == [
        "step-00000004", "step-00000005"
    ]  # fmt: skip
    again.go()
    assert all(map(torch.equal, weights(again), weights(whole)))
    rows = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]
    assert latest(tmp_path / "run" / "checkpoints").name == "step-00000006"


def test_no_step_can_be_read(tmp_path: Path) -> None:
    session(tmp_path, "--training.steps=2").go()
    file = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptData, match="no checkpoint can be read"):
        session(tmp_path, "--training.steps=4", resume=True)
    assert steps(tmp_path) == [2]


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_room_is_asked_for_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(tmp_path, "--training.steps=2")
    made.go()
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoints" / "step-00000002").glob("rank-*"))
    assert size * 0.98 < saved_bytes(made.trainer.program) < size
    for free, files, what in ((2 * size, None, "checkpoints to come: 3 of"), (9 * size, 2, "inodes")):
        monkeypatch.setattr(checkpoint, "room", lambda folder, free=free, files=files: Room(free, files))
        with pytest.raises(DiskFailure, match=what) as failed:
            session(tmp_path / str(free), "--training.steps=100", "--checkpoint.keep=1")
        assert failed.value.exit_code == 74
    monkeypatch.setattr(checkpoint, "room", lambda folder: Room(3 * size, None))
    session(tmp_path / "fits", "--training.steps=100", "--checkpoint.keep=1")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_error_that_passes_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    made, write, left = session(tmp_path, "--training.steps=2"), disk.write_parts, [times]

    def stale(path: Path, *about: object, **named: object) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return write(path, *about, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "write_parts", stale)
    if times < 3:
        made.go()
        verify(latest(tmp_path / "checkpoints"))
    else:
        with pytest.raises(DiskFailure, match="Stale file handle"):
            made.go()


def test_a_folder_that_is_gone_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    made = session(run, "--training.steps=8")
    patch = at_step(5, lambda trainer: shutil.rmtree(run))
    try:
        with pytest.raises(DiskFailure, match="gone") as failed:
            made.go()
    finally:
        patch.undo()
    assert failed.value.exit_code == 74
    assert not run.exists()


def test_metrics_do_not_follow_a_link(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    other.write_text("mine\n")
    (run / "metrics.jsonl").symlink_to(other)
    with pytest.raises(DiskFailure):
        session(run, "--training.steps=2").go()
    assert other.read_text() == "mine\n"

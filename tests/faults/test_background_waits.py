"""Saves in the background do not wait for what does not come: a writer, a disk, another rank."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faults.background import Forked, begun, check_next_save
from penteract.engine.checkpoint import committed
from penteract.engine.checkpoint.background.shared_memory import SharedMemory
from penteract.engine.checkpoint.background.writer import BackgroundWriter
from penteract.engine.checkpoint.background.writer_process import Service, serve
from penteract.engine.session.checkpoints import ReadBack
from penteract.engine.session.state_saver import StateSaver
from penteract.errors import OutOfMemory


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_read_back_that_does_not_end_holds_no_later_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves on; what was not read is not proven, so nothing is removed."""
    one = begun(tmp_path, [])
    one.save_at_once(10, 1.0, proven=False)
    monkeypatch.setattr(ReadBack, "is_reading", property(lambda _: True))
    one.saves.limit = 3.0
    one.save(20, 2.0)
    assert [(c.step, c.proven) for c in committed(tmp_path)] == [(20, False), (10, False)]
    assert one.checkpoints.before is not None and one.checkpoints.before.at.name == "step-00000020"
    one.close()


def test_each_answer_of_the_writer_has_the_whole_limit(tmp_path: Path) -> None:
    """Also where a step takes longer, and the run looks for answers between steps."""
    one = begun(tmp_path, [(10, 1.0)])
    one.fill(2.0)
    one.saves.limit = 0.1
    one.saves.start(20, {"step": 20})
    while one.saves.under_way:
        one.saves.writer.wait(20)
        time.sleep(0.15)
        one.saves.poll()
    assert (one.saves.failures, one.read()) == (0, (20, 2.0))
    one.close()


def test_a_writer_that_cannot_start_costs_one_save(tmp_path: Path) -> None:
    one = begun(tmp_path, [(10, 1.0)])

    def refused(words: object, files: object) -> Forked:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    one.checkpoints.close()
    held, spawn = len(os.listdir("/proc/self/fd")), one.saves.writer.spawn
    one.saves.writer.spawn = refused
    one.saves.start(20, {"step": 20})
    one.saves.finish()
    assert (one.saves.failures, one.read()) == (1, (10, 1.0))
    assert len(os.listdir("/proc/self/fd")) == held
    one.saves.writer.spawn = spawn
    check_next_save(one, 30)


def test_a_killed_writer_that_does_not_end_is_left(tmp_path: Path) -> None:
    """It is in a call to a disk that does not answer."""

    class Stuck(Forked):
        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "it would wait for ever"
            raise subprocess.TimeoutExpired("writer", timeout)

        def kill(self) -> None:
            pass

    one = begun(tmp_path, [(10, 1.0)])
    one.saves.writer.process = Stuck(0)
    one.saves.writer.kill()
    check_next_save(one, 20)


def test_a_save_after_one_that_was_dropped_before_its_copies_were_there(tmp_path: Path) -> None:
    one = begun(tmp_path, [])
    one.fill(3.0)
    one.saves.snapshot.take()
    one.save(10, 5.0)
    assert one.read() == (10, 5.0)
    one.close()


def test_descriptors_above_1023_are_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < 2000 else soft, hard))
    memory, (own, theirs) = SharedMemory.of_size("test", 64), socket.socketpair()
    with own, theirs, socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, 1100)) as high:
        writer = BackgroundWriter(memory, b"", _connection=high)
        theirs.sendall(b"x")
        before = time.monotonic()
        writer.wait(60)
        assert time.monotonic() < before + 30
    writer.payload.close()
    memory.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_meet_between_a_save_in_the_background_and_the_next(tmp_path: Path) -> None:
    """Rank 0 clears the folder of the next one, in which a writer of another rank may still be."""
    happened, nothing = list[str](), SimpleNamespace(during=lambda _: nullcontext())
    rank = SimpleNamespace(progress=nothing, barrier=lambda: happened.append("barrier"))
    run = SimpleNamespace(settle_parameters=lambda: happened.append("save"), done=20)
    background = SimpleNamespace(finish=lambda prune: happened.append("finish"))
    stand_ins: list[Any] = [SimpleNamespace(run=run), SimpleNamespace(rank=rank, last=20)]
    stand_ins += [SimpleNamespace(held=nullcontext), None, None, 2, background]
    StateSaver(*stand_ins).save()
    assert happened == ["finish", "barrier", "save"]


def test_the_real_writer_has_no_torch_hears_no_signals_and_dies_with_its_rank(tmp_path: Path) -> None:
    """A rank is a process here that starts a writer, tells its id and waits."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\n"
        "from penteract.engine.checkpoint.background.shared_memory import SharedMemory\n"
        "from penteract.engine.checkpoint.background.writer import BackgroundWriter\n"
        "memory = SharedMemory.of_size('test', 64)\n"
        'described = b\'{"rank": 0, "threads": 1, "largest": 4096, "levels": {}, "entries": []}\'\n'
        "writer = BackgroundWriter(memory, described)\n"
        f"asking = writer.ask('write', fresh={str(tmp_path)!r})\n"
        "try:\n"
        "    while True:\n"
        "        next(asking)\n"
        "        writer.wait(1)\n"
        "except StopIteration as done:\n"
        "    print(writer.process.pid, done.value, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid, _, answer = rank.stdout.readline().partition(" ")
        assert json.loads(answer) == {"files": {}, "tensors": {}}
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" in loaded and "torch" not in loaded
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(int(pid), number)
        time.sleep(0.2)
        assert Path(f"/proc/{pid}").exists()
        rank.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_whose_rank_is_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """Killed while its writer writes: found by a drawn kill, whose run printed the writer's traceback too."""
    own, theirs = socket.socketpair()
    memory, payload = SharedMemory.of_size("test", 64), SharedMemory.of_size("test")
    described = json.dumps({"rank": 0, "threads": 1, "largest": 4096, "levels": {}, "entries": []}).encode()
    payload.put(described)
    own.sendall(json.dumps({"do": "describe", "length": len(described)}).encode() + b"\n")
    own.close()
    serve(theirs, Service(memory, payload))
    memory.close()
    payload.close()
    assert tuple(capfd.readouterr()) == ("", "")


def test_memory_that_is_not_there_is_found_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="no host memory for the snapshot") as failed:
        SharedMemory.of_size("the snapshot of a checkpoint", 100)
    assert failed.value.exit_code == 71

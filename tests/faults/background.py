"""Saves in the background of one rank without a training, and writers that die or fail at an operation of theirs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from faults import crash_points
from layouts import Case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine import checkpoint
from penteract.engine.checkpoint import packing
from penteract.engine.checkpoint.background.shared_memory import SharedMemory
from penteract.engine.checkpoint.background.writer import BackgroundWriter, Process
from penteract.engine.checkpoint.background.writer_process import Service, serve
from penteract.engine.device.device import Cpu
from penteract.engine.rank.rank import Rank
from penteract.engine.session.background import snapshot
from penteract.engine.session.background.background_saves import BackgroundSaves
from penteract.engine.session.background.snapshot import Snapshot, SnapshotPlan
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.saved import KINDS, load_state, state_slices
from penteract.engine.state.state import TrainingState, allocate
from penteract.step.program import Program
from tiny import SIZES

CPU = torch.device("cpu")
PROGRAM = Case(ModelSpec(**SIZES), Layout(), precision="fp32").compile(0)


@dataclass(slots=True)
class Forked:
    """A process that this one has forked."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(slots=True)
class Writers:
    """Starts writers by a fork, which takes less time than a new interpreter. `prepare` is called in each first."""

    prepare: Callable[[], None] = lambda: None
    started: list[Forked] = field(default_factory=list[Forked])

    def __call__(self, words: Sequence[str], files: Sequence[int]) -> Process:
        _, connection, snapshot, size, payload = map(int, words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none
            pid = os.fork()
        if pid == 0:
            try:
                for fd in map(int, os.listdir("/proc/self/fd")):  # the other end of its socket above all
                    if fd > 2 and fd not in files:
                        with suppress(OSError):
                            os.close(fd)
                self.prepare()
                serve(socket.socket(fileno=connection), Service(SharedMemory(snapshot, size), SharedMemory(payload)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.started.append(Forked(pid))
        return self.started[-1]

    @property
    def killed(self) -> bool:
        """Whether one of them ended by a signal."""
        return any(p.poll() == -signal.SIGKILL for p in self.started)


def dying_after(count: int) -> Callable[[], None]:
    """Let `count` file operations happen, then nothing more: the writer is killed."""
    left = [count]

    def before(name: str, arguments: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    return lambda: crash_points._patched(pytest.MonkeyPatch(), before) and None


def failing_at(count: int, error: int) -> Callable[[], None]:
    """The operation after `count` others that change files fails; a read-only disk stays so."""
    left = [count]

    def before(name: str, arguments: tuple[object, ...]) -> None:
        left[0] -= changes(name, arguments, error)
        if left[0] == -1 or (error == errno.EROFS and left[0] < 0 and changes(name, arguments, error)):
            left[0] -= 1
            raise OSError(error, os.strerror(error))

    return lambda: crash_points._patched(pytest.MonkeyPatch(), before) and None


def changes(name: str, arguments: tuple[object, ...], error: int) -> bool:
    """Whether an operation is one that this error can meet."""
    creates = name == "open" and len(arguments) > 1 and bool(int(str(arguments[1])) & os.O_CREAT)
    return creates or name in (crash_points.GROWS if error in (errno.ENOSPC, errno.EDQUOT) else crash_points.CHANGES)


def noting(log: Path, error: int = 0) -> Callable[[], None]:
    """Note the writer's file operations, or those that `error` can meet, one a line."""
    fd, write = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), os.write
    os.close(fd)

    def prepare() -> None:
        to = os.open(log, os.O_WRONLY | os.O_APPEND)

        def before(name: str, arguments: tuple[object, ...]) -> None:
            if not error or changes(name, arguments, error):
                write(to, f"{name}\n".encode())

        crash_points._patched(pytest.MonkeyPatch(), before)

    return prepare


def points(log: Path) -> list[int]:
    """The numbers of the operations; of several alike in a row, as the parts of a file, the first and the last."""
    names = log.read_text().split()
    return [i for i, name in enumerate(names) if names[i - 1 : i + 2].count(name) < 3]


@dataclass(slots=True)
class OneRank:
    """A state whose numbers all follow from one, its checkpoints in `folder`, and its saves in the background."""

    folder: Path
    keep: int = 1
    epoch: int = 1
    largest: int = packing.LARGEST_FILE
    state: TrainingState = field(default_factory=lambda: allocate(PROGRAM, CPU))
    checkpoints: Checkpoints = field(init=False)
    saves: BackgroundSaves = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.folder, Rank(0, 1, CPU, None), self.keep, self.epoch)
        checkpoint.take(self.folder, self.epoch)
        plan = SnapshotPlan(PROGRAM, self.state)
        memory = SharedMemory.of_size("test", plan.size)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(snapshot, "LARGEST_FILE", self.largest)
            writer = BackgroundWriter(memory, plan.description(), Writers())
        self.saves = BackgroundSaves(self.checkpoints, Snapshot(plan, Cpu(), memory), writer, 20.0)

    @property
    def program(self) -> Program:
        return PROGRAM

    def fill(self, value: float) -> None:
        for flat in self.state.flats:
            for kind in KINDS.values():
                if (kept := flat.kept(kind)) is not None:
                    kept.fill_(value)

    def save_at_once(self, step: int, value: float, *, proven: bool = True) -> None:
        self.fill(value)
        self.checkpoints.save(step, state_slices(PROGRAM, self.state), {"step": step})
        if proven:
            checkpoint.prove(checkpoint.latest(self.folder))

    def save(self, step: int, value: float, prepare: Callable[[], None] = lambda: None) -> Writers:
        """In the background, to its end; the state changes as soon as it may."""
        writers = Writers(prepare)
        self.saves.writer.kill()
        self.saves.writer.spawn = writers
        self.fill(value)
        self.saves.start(step, {"step": step})
        for number in range(len(self.state.flats)):
            self.saves.snapshot.before_update(number)
        self.fill(-1)
        self.saves.finish()
        return writers

    def read(self) -> tuple[int, float]:
        """The step and the value of the newest checkpoint; each byte is verified."""
        state = allocate(PROGRAM, CPU)
        at = checkpoint.latest(self.folder)
        checkpoint.verify(at)
        step = int(load_state(at, PROGRAM, state)["step"])
        values = {float(x) for flat in state.flats for kind in ("master", "mean") for x in (flat.kept(kind),) for x in (
            x[: sum(q.numel(PROGRAM.mesh) for q in flat.bucket.params)].min(), x.max()) if x is not None}  # fmt: skip
        (value,) = values - {0.0}
        return step, value

    def close(self) -> None:
        self.checkpoints.close()
        self.saves.close()
        self.saves.writer.payload.close()


def begun(folder: Path, before: list[tuple[int, float]], largest: int = packing.LARGEST_FILE) -> OneRank:
    one = OneRank(folder, largest=largest)
    for step, value in before:
        one.save_at_once(step, value)
    return one


def check_next_save(one: OneRank, step: int) -> None:
    """It tidies up."""
    one.save(step, 88.0)
    assert one.read() == (step, 88.0)
    assert one.saves.failures == 0
    assert not list(one.folder.glob("*.old"))
    assert [p.name for p in one.folder.iterdir() if not p.name.startswith("step-")] in (
        ["latest", "work-000001"], ["work-000001", "latest"]
    )  # fmt: skip
    assert not list((one.folder / "work-000001").iterdir())
    one.close()

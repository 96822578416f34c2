"""A run that is asked to stop, at any moment and in any way: it ends with 75, and what was trained is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.runtime.printing import never_fails
from penteract.engine.session.grace import Grace
from penteract.engine.session.outputs.metrics import read_metrics

pytestmark = pytest.mark.waits(19)

SMALL = ("train", "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4",
         "--batch.micro_batch_size=1", "--training.validation_every=0")  # fmt: skip


def until(ready: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def trained(run: Path) -> int:
    """Steps that the run has written down."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@contextmanager
def training(folder: Path, *more: str) -> Iterator[tuple[forks.Command, Path]]:
    """A run of many steps that has done three, and its folder."""
    words = [*SMALL, "--steps=4000", f"--output.folder={folder}", *more]
    with forks.begun(words, os.environ) as command:
        until(lambda: trained(folder / "latest") >= 3)
        yield command, folder / "latest"


def saved(command: forks.Command, run: Path) -> None:
    """It has ended with 75, its last step is saved, and one line says so."""
    done = command.result(60)
    assert done.returncode == 75, done.stderr
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    assert (run / "checkpoints" / f"step-{steps[-1]:08d}" / "manifest.json").is_file()
    assert done.stderr.count("error[STOPPED]") == 1 and "Traceback" not in done.stderr
    assert '"state": "stopped"' in (run / "status.json").read_text()


def pids_of_ranks(command: forks.Command) -> list[int]:
    pid = command.process.pid
    return [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_each_of_a_schedulers_signals_saves(tmp_path: Path, number: int) -> None:
    with training(tmp_path) as (command, run):
        os.kill(command.process.pid or 0, number)
        saved(command, run)


def test_ranks_and_then_their_launcher_are_asked(tmp_path: Path) -> None:
    """As by scancel and at the time limit: each process of a job gets the signal, and the launcher passes its on."""
    with training(tmp_path, "--parallel.dp=2") as (command, run):
        for pid in pids_of_ranks(command):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)  # within a step
        os.kill(command.process.pid or 0, signal.SIGTERM)
        saved(command, run)


def test_nobody_need_read_what_is_printed(tmp_path: Path) -> None:
    """`penteract train | head -1`, and standard error on a full disk."""
    pipe, lines = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)

    def head() -> None:
        with pipe.open("rb") as file:
            lines.append(file.readline())

    reader = threading.Thread(target=head)
    reader.start()
    words = [*SMALL, "--steps=6", f"--output.folder={tmp_path / 'runs'}"]
    full = Path("/dev/full")
    process = forks.start(forks._command, words, None, environment=os.environ, out=pipe, err=full)
    process.join(60)
    reader.join()
    assert process.exitcode == 0
    assert lines[0].startswith(b"tiny, ")
    assert trained(tmp_path / "runs" / "latest") == 6
    assert (tmp_path / "runs" / "latest" / "checkpoints" / "step-00000006").is_dir()


def test_letters_that_an_encoding_lacks_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        with never_fails():
            print("dp·tp")
    assert (tmp_path / "out").read_text() == "dp\\xb7tp\n"


# ---- before the first step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 0.3), (signal.SIGINT, 0.9)])
def test_a_command_that_has_hardly_begun_is_stopped(tmp_path: Path, number: int, seconds: float) -> None:
    """In its own imports."""
    with starting(tmp_path) as command:
        time.sleep(seconds)
        _stopped_before_a_step(command, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_imports_torch_is_stopped(tmp_path: Path, number: int) -> None:
    """No line of ours runs then. Torch's library is mapped early in its import, on a machine of any speed."""
    with starting(tmp_path) as command:
        until(lambda: _has_mapped(command.pid, "libtorch_cpu"))
        _stopped_before_a_step(command, number)


@contextmanager
def starting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, with no module loaded beforehand."""
    words = [sys.executable, "-m", "penteract", *SMALL, f"--output.folder={folder}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        try:
            yield command
        finally:
            command.kill()


def _stopped_before_a_step(command: subprocess.Popen[str], number: int) -> None:
    command.send_signal(number)
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 75, errors
    assert errors.count("\n") == 1 and errors.startswith("error[STOPPED]: stopped before ")


def _has_mapped(pid: int, library: str) -> bool:
    """Whether a process or one that it started has a library in its memory."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        mapped = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended meanwhile
        return False
    return library in mapped or any(_has_mapped(int(child), library) for child in children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_is_stopped(tmp_path: Path, number: int) -> None:
    """Its main thread is in torch's C code, and no line of Python would run there for ten minutes."""
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    store = _silent_store()
    environment = os.environ | {k: str(v) for k, v in (place | {"MASTER_PORT": store.port}).items()}
    words = [*SMALL, "--parallel.dp=2", f"--output.folder={tmp_path / 'runs'}"]
    with forks.begun(words, environment) as command:
        until(lambda: store.check(["roll/row/1"]))
        time.sleep(0.1)
        asked = time.monotonic()
        os.kill(command.process.pid or 0, number)
        done = command.result(20)
    assert time.monotonic() - asked < 4
    assert (done.returncode, done.stderr.count("\n")) == (75, 1)
    assert done.stderr.startswith("error[STOPPED]: stopped before the first step")


def _silent_store():  # type: ignore[no-untyped-def]
    """A store that nobody answers in."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


STARTING = (
    "import ctypes, os; from penteract.engine.rank.stopping import Phase, Stopping; stopping = Stopping().__enter__(); "
    "stopping.enter(Phase.{}); {}print('ready', flush=True); "
    "ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
)


@pytest.mark.parametrize(
    ("phase", "before", "into"),
    [("STARTING", "the first step", ""), ("MEASURING", "all was measured", ", into another folder")],
)
def test_c_code_does_not_delay_it(phase: str, before: str, into: str) -> None:
    words = [sys.executable, "-c", STARTING.format(phase, "")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert time.monotonic() - asked < 2
    assert (process.returncode, said) == (
        75, f"error[STOPPED]: stopped before {before} · fix: start it again{into}\n"
    )  # fmt: skip


def test_what_hangs_at_the_end_does_not_delay_it_much() -> None:
    hang = "import time; stopping.before_leaving.append(lambda: time.sleep(60)); "
    with subprocess.Popen(
        [sys.executable, "-c", STARTING.format("STARTING", hang)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == 75


# ---- a second request --------------------------------------------------------------------------------------------


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    with Stopping() as one:
        one.enter(Phase.LAUNCHING)
        yield one


def test_signals_close_together_are_one_request(stopping: Stopping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penteract.engine.rank.stopping.AGAIN_S", 0.3)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    until(lambda: stopping.requests)
    time.sleep(0.1)
    assert (stopping.requests, stopping.signal) == (1, signal.SIGTERM)
    time.sleep(1.5)  # its thread may have been late
    os.kill(os.getpid(), signal.SIGUSR2)  # under nohup, hangups are ignored
    until(lambda: stopping.requests == 2, 5)


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stopping() as outer:
        with Stopping.of_process() as inner:
            assert inner is outer
        assert signal.getsignal(signal.SIGTERM) == outer._handle
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_hangup_that_nohup_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping() as one:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
            assert not one.asked
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


WORKING = """
import sys, time
from penteract.engine.rank import stopping as module
from penteract.engine.rank.stopping import Phase, Stopping

module.AGAIN_S = 0.3
with Stopping() as stopping:
    stopping.enter(Phase.WORKING, "runs/x")
    print("ready", flush=True)
    if sys.argv[1] == "saving":
        with stopping.held():
            time.sleep(1.5)
            print("saved", flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("doing", ["a step", "saving"])
def test_a_second_request_ends_a_rank_at_once_but_never_a_commit(doing: str) -> None:
    words = [sys.executable, "-c", WORKING, doing]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        time.sleep(0.4)
        assert process.poll() is None
        process.terminate()
        out, said = process.communicate(timeout=10)
    assert (process.returncode, out) == (75, "saved\n" if doing == "saving" else "")
    assert said.startswith("error[STOPPED]: stopped at once: steps after the last checkpoint are lost · runs/x")


# ---- the time that a stop takes ----------------------------------------------------------------------------------


def test_a_stop_that_takes_too_long_is_said_once() -> None:
    grace = Grace(limit=30.0, size=10e9)
    line = grace.line(step=20.0)
    assert line.startswith("a stop takes about 40.0 s: a step 20.0 s, a save 20.0 s (at 0.5 GB/s a rank); more than")
    assert grace.line(step=20.0) == ""
    assert Grace(limit=30.0, size=10e9, saved=5.0).line(step=20.0) == ""
    assert "(measured)" in Grace(limit=30.0, size=0, saved=15.0).line(step=20.0)
    assert Grace(limit=30.0, size=0, saved=12.0, saves=1).line(step=10.0) == ""
    assert "about 34.0 s" in Grace(limit=30.0, size=0, saved=12.0, saves=2).line(step=10.0)  # one may be under way

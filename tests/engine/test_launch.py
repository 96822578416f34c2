"""Ranks of our own: started with what they need, stopped politely, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forks
from penteract.config import cgroup
from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.run_folder import rundir
from penteract.engine.runtime import launch as launcher
from penteract.engine.runtime.launch import launch
from together import together

pytestmark = pytest.mark.waits(17)

RANK = Path(__file__).with_name("ranks.py")


def run(folder: Path, world: int, orders: dict[str, Any], environment: dict[str, str] | None = None) -> int:
    orders = {"launched": True, **orders}
    return launch(world, [str(RANK), str(folder), json.dumps(orders)], folder, environment or dict(os.environ))


@dataclass(frozen=True)
class Outcome:
    """A launcher's exit code, what was printed to stderr, and how many seconds it took."""

    folder: Path
    code: int | None
    said: str
    seconds: float


def run_with_torch(folder: Path, orders: dict[str, Any]) -> Outcome:
    """Two ranks that need torch, forked as their launcher is from a process that has it."""
    out, err = folder / "out", folder / "err"
    begun = time.monotonic()
    process = forks.start(_launch, folder, orders, environment=os.environ, out=out, err=err)
    try:
        process.join(60)
    finally:
        process.kill()
        process.join()
    return Outcome(folder, process.exitcode, err.read_text(), time.monotonic() - begun)


def _launch(folder: Path, orders: dict[str, Any]) -> int:
    forks._fork_ranks()
    words = ["-m", "engine.ranks", str(folder), json.dumps({"launched": True, **orders})]
    return launch(2, words, folder, dict(os.environ))


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(paths: list[Path], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not all(p.exists() for p in paths):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_each_rank_is_told_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = {k: v for k, v in os.environ.items() if not k.startswith("OMP")} | {"OMP_WAIT_POLICY": "active"}
    assert run(tmp_path, 3, {"plain": "hello"}, given) == 0
    assert capfd.readouterr().out == "rank 0 says hello\n"
    assert (tmp_path / "logs" / "rank-00002.log").read_text() == "rank 2 says hello\n"
    told = [json.loads((tmp_path / f"env-{r}").read_text()) for r in range(3)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in told] == [
        (str(r), str(r), "3", "3") for r in range(3)
    ]
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in told} == {("127.0.0.1", told[0]["MASTER_PORT"])}
    assert told[0]["OMP_NUM_THREADS"] == str(max(1, usable_here() // 3))
    assert told[0]["OMP_WAIT_POLICY"] == "active"  # what the user has set stays
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_ranks_save(tmp_path: Path, number: int) -> None:
    def send() -> None:
        wait_for([tmp_path / f"ready-{r}" for r in range(2)])
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert run(tmp_path, 2, {"plain": "save"}) == 75
    thread.join()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_ranks_that_a_signal_ends_too_early_are_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def send() -> None:
        wait_for([tmp_path / f"ready-{r}" for r in range(2)])
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    assert run(tmp_path, 2, {"plain": "unready"}) == 75
    thread.join()
    assert capfd.readouterr().err.startswith("error[STOPPED]: stopped before it could save · ")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_a_rank_that_does_not_leave_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    monkeypatch.setattr(launcher, "KILL_S", 0.5)
    assert run(tmp_path, 2, {"plain": "deaf"}) == 70
    assert "error[RANK]: rank 1 ended with exit code 3" in capfd.readouterr().err
    assert all(gone(int((tmp_path / f"pid-{r}").read_text())) for r in range(2))


def test_a_rank_that_still_waits_for_a_killed_one_does_not_say_that_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 3.0)
    assert run(tmp_path, 2, {"plain": "joining"}) == 72
    wait_for([tmp_path / "ready-0"])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error[LOST]: rank 1 was ended by SIGKILL")


def test_an_error_before_the_ranks_know_of_each_other_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, 2, {"early": 1, "plain": "hello"}) == 2
    assert capfd.readouterr().err == "error[DEVICE]: no such device\n"


# What the ranks of a run with torch do. They wait for each other most of the time: all runs are at once.
WITH_TORCH: dict[str, dict[str, str]] = {
    "raises": {"1": "raise"},
    "both, rank 0 first": {"0": "raise first", "1": "raise"},
    "both, rank 1 first": {"0": "raise", "1": "raise first"},
    "killed": {"1": "kill"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Future[Outcome]]:
    folders = {name: tmp_path_factory.mktemp("run") for name in WITH_TORCH}
    return together({name: partial(run_with_torch, folders[name], orders) for name, orders in WITH_TORCH.items()})


def test_the_culprits_code_and_line(outcomes: Mapping[str, Future[Outcome]]) -> None:
    run = outcomes["raises"].result()
    assert run.code == 73
    err = [line for line in run.said.splitlines() if line.startswith("error[")]
    assert [line.split("]")[0] for line in err] == ["error[NUMERICS"]


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_that_all_ranks_fail_with_is_printed_once(
    outcomes: Mapping[str, Future[Outcome]], first: int
) -> None:  # fmt: skip
    """Whichever rank is the first to tell the others of it."""
    run = outcomes[f"both, rank {first} first"].result()
    assert run.code == 73
    err = [line for line in run.said.splitlines() if line.startswith("error[")]
    assert [line.split("]")[0] for line in err] == ["error[NUMERICS"]
    rows = [json.loads(line) for line in (run.folder / "errors.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows] == [first]


def test_a_killed_rank_ends_the_run(outcomes: Mapping[str, Future[Outcome]]) -> None:
    run = outcomes["killed"].result()
    assert run.code == 72
    assert run.seconds < 40
    assert "rank 1 was ended by SIGKILL" in run.said


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGSEGV, "SIGSEGV: a library used memory that is not its own"),
        (signal.SIGABRT, "SIGABRT: a library gave up"),
        (signal.SIGBUS, "SIGBUS: a mapped file was cut shorter, or /dev/shm is full"),
        (signal.SIGILL, "SIGILL: this processor lacks an instruction"),
        (signal.SIGFPE, "SIGFPE: a library divided by zero"),
        (signal.SIGXCPU, "SIGXCPU: its limit of processor time"),
        (signal.SIGHUP, "SIGHUP: its terminal was closed"),
        (signal.SIGTERM, "SIGTERM: sent by a person, a scheduler or a time limit"),
        (signal.SIGUSR1, "SIGUSR1: sent by a person"),
        (signal.SIGKILL, "SIGKILL: sent by a person"),
        (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}: sent by a person"),
    ],
)
def test_each_signal_has_its_own_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int, cause: str
) -> None:
    assert run(tmp_path, 2, {"plain": f"die {int(number)}"}) == 72
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error[LOST]: rank 1 was ended by ") and cause in line and "memory left" not in line
    (row,) = rundir.errors(tmp_path)
    assert (row["rank"], row["code"]) == (1, "LOST")


@pytest.mark.parametrize(("file", "version"), [("memory.events", 2), ("memory.oom_control", 1)])
@pytest.mark.parametrize("counted", [True, False])
def test_only_a_counted_kill_is_a_lack_of_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str, version: int,
    counted: bool,
) -> None:  # fmt: skip
    counter = tmp_path / "cgroup" / ("memory" if version == 1 else "") / "job" / file
    counter.parent.mkdir(parents=True)
    counter.write_text("oom 1\noom_kill 1\n")  # of another process, before this run
    (tmp_path / "self").write_text("0::/job\n" if version == 2 else "4:memory:/job\n0::/\n")
    read = partial(cgroup.memory_kills, tmp_path / "cgroup", tmp_path / "self")
    monkeypatch.setattr(cgroup, "memory_kills", read)
    assert run(tmp_path, 2, {"plain": "die 9" + f" {counter}" * counted}) == (71 if counted else 72)
    (line,) = capfd.readouterr().err.splitlines()
    if counted:
        assert line.startswith("error[MEMORY]: rank 1 was ended by SIGKILL: the host had no memory left")
        assert "found 1 killed for memory in this control group" in line
    else:
        assert line.startswith("error[LOST]: rank 1 was ended by SIGKILL: sent by a person")
        assert "none was killed for memory" in line
    assert rundir.errors(tmp_path)[-1]["exit_code"] == (71 if counted else 72)


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    words = [str(RANK), str(tmp_path), json.dumps({"plain": "save"})]
    code = (
        "import os; from pathlib import Path; from penteract.engine.runtime.launch import launch; "
        f"launch(2, {words!r}, Path({str(tmp_path)!r}), os.environ)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for([tmp_path / f"ready-{r}" for r in range(2)])
    finally:
        parent.kill()
        parent.wait()
    pids = [int((tmp_path / f"pid-{r}").read_text()) for r in range(2)]
    until = time.monotonic() + 5
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert all(map(gone, pids))


def test_the_launcher_loads_no_torch() -> None:
    code = "import sys, penteract.engine.runtime.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""A main thread that hangs is found by a thread of its own rank, also where there is no other rank."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import ModuleType

import pytest

import forks
from faults.hanging import PAUSE_S, alone
from faults.test_hangs import ended, ranks, says
from faults.test_saved_state import session
from penteract.config.run import Limits
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.hangs import own_watch
from penteract.engine.runtime.hangs.own_watch import OwnWatch, held_by_debugger, prints, stacks
from penteract.engine.runtime.hangs.record import Record
from together import together

pytestmark = pytest.mark.waits(7)

LIMIT = 10  # of a step; a fifth of it is the least bound


def ran(folder: Path, order: str, at: int = 12, **limits: int) -> tuple[int | None, list[str], float]:
    """(exit code, error lines, seconds from the fault to the end) of a run of one rank."""
    told = {"order": order, "at": at, "limits": {"step": LIMIT} | limits}
    process = forks.start(
        alone, [str(folder), json.dumps(told)], out=folder / "out", err=folder / "err", environment=os.environ
    )
    try:
        process.join(60)
        over = time.time()
        lines = [line for line in (folder / "err").read_text().splitlines() if line.startswith("error[")]
        return process.exitcode, lines, over - float((folder / "hung").read_text())
    finally:
        process.kill()
        process.join()


HANGS: dict[str, dict[str, int]] = {"step": {}, "in C": {}, "save": {"save": 3}, "compile": {"compile": 3}}
GO_ON: dict[str, tuple[str, int, dict[str, int]]] = {
    "before enough steps are timed, the limit holds": ("goes on", 5, {}),
    "a larger limit waits longer": ("goes on", 12, {"step": 60}),
    "a large text takes as long as it takes": ("preparing", 3, {"data": 1}),
    "a debugger holds it": ("traced", 12, {}),
}
Outcome = tuple[int | None, list[str], float, Path]
Runs = Mapping[str, Future[Outcome]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What `ran` found, and the folder: of what hangs, of what goes on, and of four ranks of which one hangs."""

    def of_one(order: str, at: int, limits: dict[str, int]) -> Outcome:
        folder = tmp_path_factory.mktemp("run")
        return *ran(folder, order, at, **limits), folder

    def of_several() -> Outcome:
        with ranks(folder := tmp_path_factory.mktemp("run"), limit=15, rank3="between", at=12) as started:
            return None, [ended(started)], 0.0, folder  # in 9 s; it looks at the codes

    hanging = {order: partial(of_one, order, 12, limits) for order, limits in HANGS.items()}
    return together(hanging | {name: partial(of_one, *how) for name, how in GO_ON.items()} | {"several": of_several})


@pytest.mark.parametrize("order", ["step", "in C"])
def test_a_run_of_one_rank_that_hangs_is_ended(runs: Runs, order: str) -> None:
    code, lines, took, folder = runs[order].result()
    assert code == 72 and len(lines) == 1
    assert LIMIT / 5 <= took < LIMIT  # long before the limit
    says(lines[0], "error[HUNG]: rank 0 (host HOST) hangs: its main thread has made no progress for ", " s, and a step "
         "takes 0.0", "s; rank 0 is in phase step, step 12, after F0", "stacks-00000.txt has the stack of every thread",
         "--limits.step waits longer")  # fmt: skip
    (row,) = rundir.errors(folder)
    shown = (folder / "logs" / "stacks-00000.txt").read_text()
    assert row["traceback"] == shown and (row["rank"], row["exit_code"]) == (0, 72)
    assert shown.startswith("thread MainThread:\n") and "in hang_alone" in shown.split("\nthread ")[0]
    assert "thread a-loader:\n" in shown and "thread watch-alone:\n" in shown
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 72)


@pytest.mark.parametrize("order", ["save", "compile"])
def test_other_phases_have_their_limits(runs: Runs, order: str) -> None:
    code, lines, took, _ = runs[order].result()
    assert code == 72 and 3 <= took < 8
    assert f"rank 0 is in phase {order}" in lines[0] and f"--limits.{order} waits longer" in lines[0]


@pytest.mark.parametrize("name", GO_ON)
def test_what_goes_on_is_waited_for(runs: Runs, name: str) -> None:
    code, lines, took, folder = runs[name].result()
    assert (code, lines) == (0, []) and took >= PAUSE_S
    assert rundir.errors(folder) == [] and not (folder / "logs").exists()


def test_of_several_ranks_the_one_that_hangs_speaks_first(runs: Runs) -> None:
    _, (line,), _, folder = runs["several"].result()
    says(line, "error[HUNG]: rank 3 (host HOST) hangs: its main thread has made no progress for ", "rank 3 is in phase "
         "step, step 12, after F0", "stacks-00003.txt has the stack of every thread")  # fmt: skip
    assert "in pause" in rundir.errors(folder)[0]["traceback"]


# ---- the bound -------------------------------------------------------------------------------------------------------


def progress(seconds: float, count: int = 20, **limits: int) -> RankProgress:
    made = RankProgress(Limits(**limits))
    made.begin_step(30)
    made.step_times.extend([seconds] * count)
    return made


@pytest.mark.parametrize(
    ("seconds", "count", "bound"),
    [(0.1, 20, 60), (4, 20, 120), (100, 20, 300), (4, 7, 300)],  # a share of the limit, steps, the limit; too few
)
def test_the_bound_is_of_many_steps(seconds: float, count: int, bound: float) -> None:
    assert progress(seconds, count).bound(alone=True) == bound
    assert progress(seconds, count).bound(alone=False) == (bound if count >= 8 else inf)


def test_phases_without_steps_are_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = progress(0.1, save=70, step=50)
    with made.during("save"):
        assert (made.bound(alone=True), made.bound(alone=False)) == (70, inf)
    assert made.reading(lambda: (made.bound(alone=True), made.bound(alone=False))) == (50, inf)
    made.enter("data")
    assert made.bound(alone=True) == inf


def test_a_step_is_timed_from_its_beginning_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 90.0, 92.0, 95.0, 200.0])
    made = RankProgress()
    monkeypatch.setattr("penteract.engine.rank.rank_progress.time.monotonic", times.__next__)
    for number in (1, 2, 3, 4, 9):  # the first compiles; between 4 and 9 there is no step
        made.begin_step(number, first=number == 1)
    assert [*made.step_times] == [2.0, 3.0]


def test_a_session_times_its_steps(tmp_path: Path) -> None:
    made = session(tmp_path, "--training.steps=12")
    made.go()
    usual = made.rank.progress.median_step
    assert usual is not None and 0 < usual < 10
    assert made.rank.progress.ticks > 50


# ---- who is excused --------------------------------------------------------------------------------------------------


def late(idle: float) -> Record:
    return Record(1, "here", "step", 30, "F0", idle, 300, "step")


def test_who_waits_in_a_collective_is_judged_by_others() -> None:
    watch = OwnWatch(progress(0.1), 3, alone=False)
    assert watch.tick(replace(late(1e4), waits=("dp {0,1}", 7))) is None
    assert watch.tick(replace(late(1e4), phase="done")) is None
    assert watch.tick(late(59)) is None
    found = watch.tick(late(61))
    assert found is not None and found.ranks == (3,) and "for 61 s, and a step takes 0.1 s" in found.what


def test_time_under_a_debugger_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, held = OwnWatch(progress(0.1), 0, alone=True), [True]
    monkeypatch.setattr(own_watch, "held_by_debugger", lambda: held[0])
    assert watch.tick(late(500)) is None
    held[0] = False
    assert watch.tick(late(559)) is None  # since it was let go
    assert watch.tick(late(561)) is not None
    watch = OwnWatch(progress(0.1), 0, alone=True)
    held[0] = True
    assert watch.tick(late(100)) is None
    held[0] = False
    assert watch.tick(late(0)) is None  # progress: the next wait is counted from its beginning
    assert watch.tick(late(61)) is not None


def test_debuggers_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_watch, "_STATUS", tmp_path / "status")
    before = sys.gettrace()
    if before is None:  # not under a debugger or coverage
        assert not held_by_debugger()
    for tracer, held in ((0, False), (4711, True)):
        (tmp_path / "status").write_text(f"Name:\tpython\nTracerPid:\t{tracer}\n")
        assert held_by_debugger() == (held or before is not None)
    (tmp_path / "status").unlink()
    monkeypatch.setitem(sys.modules, "debugpy", ModuleType("debugpy"))
    assert held_by_debugger()


def test_a_terminal_that_stands_still_is_no_hang(tmp_path: Path) -> None:
    """The main thread prints into a pipe that nobody reads."""
    from penteract.engine.runtime.printing import _NeverFails

    assert not prints()
    reader, writer = os.pipe()
    found = list[bool]()

    def look() -> None:
        time.sleep(0.5)
        found.append(prints())
        while os.read(reader, 2**16):
            pass

    thread = threading.Thread(target=look)
    thread.start()
    _NeverFails(writer).write(bytes(2**18))
    os.close(writer)
    thread.join()
    os.close(reader)
    assert found == [True]


def test_stacks_are_of_all_threads() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="waits")
    thread.start()
    text = stacks()
    over.set()
    thread.join()
    assert text.startswith("thread MainThread:\n") and "in test_stacks_are_of_all_threads" in text
    assert "thread waits:\n" in text and "in wait" in text.split("thread waits:\n")[1]

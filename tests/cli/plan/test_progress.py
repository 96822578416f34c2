"""A long search shows how far it is, where somebody sees it, and can be stopped."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from rich.console import Console

from penteract import plan
from penteract.cli.resolve.planning.progress_line import AFTER, ProgressLine, sentence
from penteract.planner.plan import NOT_REACHED
from penteract.planner.search.progress import EVERY, Progress, Pulse, Stopped

Tell = Callable[..., Any]
LONG = ["llama-3.1-70b", "--gpus", "64x8xH100"]  # a layout that fits is found soon, the best of them late
PATIENCE = 120  # seconds


def ticking(step: float) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is looked at."""
    ticks = count()
    return lambda: next(ticks) * step


def progress(seconds: float) -> Progress:
    return Progress(seconds, 1234, 98_765, None)


def test_a_pulse_tells_every_so_often() -> None:
    told = list[Progress]()
    pulse = Pulse(told.append, progress, clock=ticking(EVERY / 4))
    for _ in range(40):
        pulse()
    assert 8 <= len(told) <= 10
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    Pulse()()  # nobody watches


def test_a_line_is_shown_after_two_seconds_and_leaves_nothing() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    clock = ticking(AFTER / 2)
    with ProgressLine(shown=True, console=console, clock=clock) as line:
        line(progress(1.0))
        assert screen.getvalue() == ""
        line(progress(2.0))
        assert "1 234 layouts priced, 98 765 left" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # what was there is wiped out


def test_nothing_is_shown_where_nobody_sees_it() -> None:
    screen = io.StringIO()
    with ProgressLine(shown=False, console=Console(file=screen, force_terminal=True), clock=ticking(AFTER)) as line:
        line(progress(10.0))
    assert screen.getvalue() == ""


def test_lines_come_ever_farther_apart_where_there_is_no_terminal() -> None:
    log = io.StringIO()
    with ProgressLine(shown=False, clock=ticking(1.0), log=log) as line:
        for second in range(1, 100):
            line(progress(float(second)))
    assert [text.split(" s")[0] for text in log.getvalue().splitlines()] == ["10", "20", "40", "80"]


def test_python_watches_and_stops_a_search() -> None:
    """As Ctrl-C does. What is told so far is what was simulated so far, and the counts add up."""
    seen = list[Progress]()

    def stop_when_there_is_one(told: Progress) -> None:
        seen.append(told)
        if told.best:
            raise KeyboardInterrupt

    with pytest.raises(Stopped) as raised:
        plan("llama-3.1-70b", "4x8xH100", watch=stop_when_there_is_one)
    found = raised.value.plan
    assert not found.complete and isinstance(raised.value, KeyboardInterrupt)
    assert found.best.time == seen[-1].best.time if seen[-1].best else False
    counts = found.counts
    assert seen[0].left > seen[-1].left == counts.refused[NOT_REACHED] > 0
    assert counts.enumerated == counts.fit + sum(counts.refused.values())
    assert "best so far" in sentence(seen[-1])


def test_a_plan_that_was_not_stopped_says_so(tell: Tell) -> None:
    told = tell("plan", "tiny", "--gpus", "4xH200", "--seq", "256", "--batch", "16seqs", "--fix", "pp=1,cp=1", "--json")
    assert json.loads(told.out)["complete"] is True


def test_ctrl_c_prints_the_best_so_far() -> None:
    """On a terminal: the line comes, and is gone when the answer is there."""
    here, there = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "penteract", "plan", *LONG], stdin=there, stdout=there, stderr=there,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "240"},
    )  # fmt: skip
    os.close(there)
    screen, ends = b"", time.monotonic() + PATIENCE
    while b"best so far" not in screen and time.monotonic() < ends:
        screen += os.read(here, 4096)
    run.send_signal(signal.SIGINT)
    after = b""
    while True:
        try:
            some = os.read(here, 4096)
        except OSError:  # the other side is closed
            break
        if not some:
            break
        after += some
    assert run.wait(PATIENCE) == 130
    assert b"layouts priced" in screen
    assert after.count(b"INCOMPLETE: the search was stopped.") == 2
    assert b"The best so far:" in after and b"Traceback" not in after


STOPPED_AT = """
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Stop())
runpy.run_module("penteract", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["penteract.cli.app", "penteract.planner.plan", "cyclopts", "penteract.cli.plan"])
@pytest.mark.parametrize("program", ["-m", "/usr/bin/penteract"])
def test_ctrl_c_while_it_is_loaded_is_quiet(module: str, program: str) -> None:
    code = STOPPED_AT.replace("runpy.run", f"sys.argv = [{program!r}, 'plan', {module!r}]; runpy.run")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_without_a_terminal_prints_json() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "penteract", "plan", *LONG, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    time.sleep(3)  # a search that has begun, or is about to: either ends by 130
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130
    assert "layouts priced" not in out + err
    if out:
        assert json.loads(out)["complete"] is False

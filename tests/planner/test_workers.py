"""Searches with workers ahead of them answer as a single process does, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draws import seeds
from penteract.config.precision.policy import RECIPES
from penteract.planner.ask import Ask
from penteract.planner.plan import Plan, estimator, plan_layouts
from penteract.planner.search import workers as module
from penteract.planner.search.best import Search
from penteract.planner.search.progress import Progress, Stopped
from penteract.planner.search.workers import Workers
from planner.every_layout import ASKS, drawn_question

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def found(plan: Plan) -> dict[str, Any]:
    """All that a search leaves."""
    priced = plan.search.frontier.found
    return {
        "layouts": plan.layouts, "counts": plan.counts, "estimates": plan.search.estimates, "nearest": priced.nearest,
        "slower": [(s.twin, s.layout) for s in priced.slower], "higher": [h.options for h in priced.higher],
        "adopted": plan.search.adopted, "left": plan.search.frontier.left, "larger": plan.larger,
    }  # fmt: skip


def planned(ask: Ask, workers: int | None, top: int = 10) -> Plan:
    return plan_layouts(ask, estimator, top=top, workers=workers)


ASK = ASKS["dense"]


@cache
def alone() -> dict[str, Any]:
    """What a single process finds."""
    return found(planned(ASK, 0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Workers]:
    """The workers of searches from here on."""
    every, original = list[Workers](), Workers.__init__

    def init(self: Workers, search: Search, k: int, number: int) -> None:
        every.append(self)
        original(self, search, k, number)

    monkeypatch.setattr(Workers, "__init__", init)
    return every


def gone(workers: Workers) -> bool:
    """Whether all processes of these workers end, and are collected."""
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers.pids) and time.monotonic() < end:
        module._collect()
        time.sleep(0.01)
    return time.monotonic() < end


@pytest.mark.parametrize("name", ASKS)
def test_an_answer_is_the_same_with_any_number_of_workers(name: str, started: list[Workers]) -> None:
    one = found(planned(ASKS[name], 0))
    for number in (1, 3):
        assert found(planned(ASKS[name], number)) == one
    assert len(started) == 2 and all(workers.used > 20 for workers in started) and all(map(gone, started))


@seeds(8, first=100)
def test_drawn_questions_are_answered_the_same(seed: int, started: list[Workers]) -> None:
    """Where much, little or nothing fits, of one precision or two."""
    ask = drawn_question(seed)
    assert found(planned(ask, 2, top=6)) == found(planned(ask, 0, top=6))
    assert started


def test_fp8_and_its_refusals_are_the_same() -> None:
    ask = replace(ASK, precision=RECIPES["fp8_tensorwise"], also=(RECIPES["bf16"],))
    assert found(planned(ask, 2)) == found(planned(ask, 0))


def test_no_value_of_a_worker_is_computed_twice(monkeypatch: pytest.MonkeyPatch, started: list[Workers]) -> None:
    """What is missed is only bounds of simpler meshes: which are looked at depends on other families."""
    missed, original = list[Any](), Workers.computed

    def computed(self: Workers, key: Any, share: int) -> Any:
        value = original(self, key, share)
        if share and value is None:
            missed.append(key)
        return value

    monkeypatch.setattr(Workers, "computed", computed)
    planned(ASK, 2)
    assert started[0].used > 100 and all(len(key) == 3 and isinstance(key[0], int) for key in missed)


def test_what_is_asked_of_a_search_later_needs_no_worker() -> None:
    plans = [planned(ASK, workers, top=2) for workers in (0, 2)]
    more = [[t.layout for t in p.search.best(20)] for p in plans]
    assert more[0] == more[1] and len(more[0]) == 20


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_die_or_stop_are_only_missed(
    what: signal.Signals, monkeypatch: pytest.MonkeyPatch, started: list[Workers]
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    original = Workers.reached

    def reached(self: Workers, bound: float, last: float) -> bool:
        if self.used > 30 and not hit:
            hit.extend(self.pids)
            for pid in self.pids:
                os.kill(pid, what)
        return original(self, bound, last)

    hit = list[int]()
    monkeypatch.setattr(Workers, "reached", reached)
    assert found(planned(ASK, 2)) == alone()
    assert len(hit) == 2 and gone(started[0])


def test_workers_that_raise_are_only_missed(monkeypatch: pytest.MonkeyPatch, started: list[Workers]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(module, "_look_ahead", fail)
    assert found(planned(ASK, 2)) == alone()
    assert started[0].used == 0


def test_a_search_that_is_stopped_ends_its_workers(started: list[Workers]) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        plan_layouts(replace(ASK, global_batch_size=1024), estimator, watch=stop, workers=2)
    assert not stopped.value.plan.complete
    assert all(map(gone, started))


def test_a_process_with_threads_has_no_room() -> None:
    script = """
import threading
from penteract.planner.search.workers import MOST, room
import os
assert 0 <= room() <= min(len(os.sched_getaffinity(0)) - 1, MOST), room()
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
assert room() == 0
end.set()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_search_that_ends_at_once_has_none(started: list[Workers]) -> None:
    planned(replace(ASK, pins={"pp": (1,), "tp": (1,)}), workers=None)
    assert not started

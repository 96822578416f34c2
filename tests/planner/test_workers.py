"""Searches with workers ahead of them answer as a single process does, whatever becomes of the workers."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest

from draws import seeds
from penteract.config.precision.policy import RECIPES
from penteract.planner.ask import Ask
from penteract.planner.plan import Plan, estimator, plan_layouts
from penteract.planner.search import best, rows
from penteract.planner.search import workers as module
from penteract.planner.search.best import Search
from penteract.planner.search.progress import Progress, Stopped
from penteract.planner.search.shared_values import Key, Values
from penteract.planner.search.workers import Workers, _Sender, room
from penteract.units import GIB
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
    """The workers of searches from here on. A slow machine is no fault of theirs."""
    every, original = list[Workers](), Workers.start

    def start(self: Workers, search: Search, k: int) -> None:
        every.append(self)
        original(self, search, k)

    monkeypatch.setattr(Workers, "start", start)
    monkeypatch.setattr(module, "PATIENCE", 60)
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


@seeds(4, first=100, wide=40)
def test_drawn_questions_are_answered_the_same(seed: int, started: list[Workers]) -> None:
    """Where much, little or nothing fits, of one precision or two."""
    ask = drawn_question(seed)
    assert found(planned(ask, 2, top=6)) == found(planned(ask, 0, top=6))
    assert started


@seeds(4, first=200)
def test_each_value_of_a_worker_is_what_the_search_would_compute_then(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of rows, which depend on what was priced before: an equal answer does not show that."""
    compared = list[object]()

    def value(values: Values, share: int, key: Key, compute: Callable[[], Any]) -> Any:
        sent = values.computed(key, share)
        here = compute()
        if sent is not None:
            assert repr(sent) == repr(here), key
            compared.append(key)
        values.put(key, here)  # of a worker, which is a copy of this
        return here

    monkeypatch.setattr(rows, "value", value)
    monkeypatch.setattr(best, "value", value)
    planned(drawn_question(seed), 2, top=6)
    assert compared


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


@pytest.fixture
def files() -> Iterator[None]:
    """No file stays open."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.usefixtures("files")
def test_where_no_more_processes_may_start_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, started: list[Workers]
) -> None:
    original = os.fork

    def fork() -> int:
        if started[0].pids:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return original()

    monkeypatch.setattr(os, "fork", fork)
    assert found(planned(ASK, 3)) == alone()
    assert len(started[0].pids) == 1 and started[0].used and gone(started[0])


@pytest.mark.usefixtures("files")
def test_a_signal_between_start_and_record_of_a_worker_waits(
    monkeypatch: pytest.MonkeyPatch, started: list[Workers]
) -> None:
    original = os.fork

    def fork() -> int:
        pid = original()
        signal.raise_signal(signal.SIGINT)  # in the worker, too: it ignores it
        return pid

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(Stopped):
        planned(ASK, 2)
    assert len(started[0].pids) == 1 and gone(started[0])


def collect_all(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, collect_all])
def test_a_program_may_collect_all_its_processes(handler: Any, started: list[Workers]) -> None:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        for _ in range(2):
            assert found(planned(ASK, 1)) == alone()
        assert all(map(gone, started))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_program_may_have_a_thousand_files(monkeypatch: pytest.MonkeyPatch, started: list[Workers]) -> None:
    def pipe() -> tuple[int, int]:
        few = original()
        many = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in few]
        for end in few:
            os.close(end)
        return many[0], many[1]

    original, (soft, hard) = os.pipe, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("no process here may have so many")
    monkeypatch.setattr(os, "pipe", pipe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        assert found(planned(ASK, 1)) == alone()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started[0].used > 20


def test_a_worker_keeps_its_pipe_alone(monkeypatch: pytest.MonkeyPatch, started: list[Workers]) -> None:
    def look(search: Search, k: int, share: int, sender: _Sender) -> None:
        score = int(Path("/proc/self/oom_score_adj").read_text())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        sender.put((share,), (len(os.listdir("/proc/self/fd")), score, {signal.SIGINT, signal.SIGTERM} <= blocked))
        sender.reached(inf, inf)

    monkeypatch.setattr(module, "_look_ahead", look)
    planned(ASK, 2)
    for share in (1, 2):  # with the folder of files, which is read
        assert started[0]._values[share,] == (2, 1000, True)


def test_a_worker_looks_as_far_as_the_search() -> None:
    """Times that are equal to four digits are equal."""
    seen = memoryview(bytearray(16)).cast("d")
    seen[0] = 1.234
    sender = _Sender(-1, seen, 1)
    assert sender.reached(1.2349, inf) and not sender.reached(1.2351, inf)


@pytest.mark.parametrize("number", [-1, 0, 2])
def test_systems_that_cannot_fork_have_none(
    number: int, monkeypatch: pytest.MonkeyPatch, started: list[Workers]
) -> None:
    monkeypatch.delattr(os, "fork")
    assert found(planned(ASK, number)) == alone()
    assert not started


@pytest.mark.parametrize(
    ("quota", "memory", "most"),
    [(None, None, 7), (4.0, None, 3), (4.9, 2 * GIB, 2), (0.5, None, 0), (None, GIB - 1, 0)],
)
def test_control_groups_limit_the_room(
    quota: float | None, memory: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four cores, of which most are idle."""
    monkeypatch.setattr(os, "listdir", lambda _: ["1"])
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(module.cgroup, "cores", lambda: quota)
    monkeypatch.setattr(module.cgroup, "memory_left", lambda: memory)
    assert room() == most


def test_where_proc_is_hidden_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", hidden)
    assert room() == 0


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


def test_a_program_leaves_no_worker_to_others() -> None:
    """Nor one that has ended: the first process of a container may not collect it."""
    script = """
import time
from penteract import plan
from penteract.planner.search import workers
workers.PATIENCE, workers._look_ahead = 0.05, lambda *_: time.sleep(60)
plan("llama-3.2-1b", "8xH200", batch="1Mi", workers=2)
print(*workers._ENDED)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert len(done.stdout.split()) == 2
    assert not [pid for pid in done.stdout.split() if Path(f"/proc/{pid}").exists()]

"""Real gloo ranks: one fails, and all are gone in time, with the right exit codes and the culprit named."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import forks
from engine.ranks import main
from penteract.engine.rank.failures import is_of_a_peer
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.hangs.pace import MOST, REQUESTS, Pace
from penteract.engine.runtime.watch import Watcher
from together import together

pytestmark = pytest.mark.waits(11)


class World:
    """Ranks started without a launcher, as a cluster's would be."""

    def __init__(self, folder: Path, world: int, orders: dict[str, str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        place = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        self.files = [folder / f"said-{r}" for r in range(world)]
        self.processes = [
            forks.start(
                main, [str(folder), json.dumps(orders)], out=folder / f"out-{r}", err=self.files[r],
                environment=os.environ | {name: str(value) for name, value in (place | {"RANK": r}).items()},
            )
            for r in range(world)
        ]  # fmt: skip

    def codes(self, seconds: float, ranks: list[int] | None = None) -> list[int | None]:
        """Exit codes of `ranks` (all) when all of them have ended, or after `seconds`."""
        chosen = [p for r, p in enumerate(self.processes) if ranks is None or r in ranks]
        until = time.monotonic() + seconds
        while any(p.exitcode is None for p in chosen) and time.monotonic() < until:
            time.sleep(0.05)
        return [p.exitcode for p in chosen]

    def said(self, rank: int) -> str:
        lines = self.files[rank].read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith("error["))


@contextmanager
def started(folder: Path, world: int, **orders: str) -> Iterator[World]:
    ranks = World(folder, world, {name.removeprefix("rank"): order for name, order in orders.items()})
    try:
        yield ranks
    finally:
        for p in ranks.processes:
            p.kill()  # a rank that is stopped, too
            p.join()


STARTING_S = 45.0  # the first time with torch to import, on a busy machine
LEAVING_S = 10.0  # what is promised


@dataclass(frozen=True)
class Case:
    """Ranks, what some of them do, and whose end the others follow; without one, all end by themselves."""

    world: int
    orders: dict[str, str]
    first: int | None = None

    def outcome(self, folder: Path) -> Outcome:
        with started(folder, self.world, **self.orders) as ranks:
            if self.first is not None:
                ranks.codes(STARTING_S, [self.first])
            codes = ranks.codes(STARTING_S if self.first is None else LEAVING_S)
            return Outcome(folder, codes, [ranks.said(r) for r in range(self.world)])


@dataclass(frozen=True)
class Outcome:
    """All exit codes, the others' within what is promised from the end of the first rank, and the errors that each
    printed."""

    folder: Path
    codes: list[int | None]
    said: list[str]


# Ranks wait for each other most of the time: all cases run at once.
CASES = {
    "raises": Case(3, {"rank1": "raise", "rank2": "sleep"}, 1),  # rank 0 hangs in gloo, rank 2 outside of it
    "rank 0 fails": Case(3, {"rank0": "bug", "rank1": "sleep"}, 0),
    "rank 0 is killed": Case(3, {"rank0": "kill"}, 0),
    "rank 1 is killed": Case(3, {"rank1": "kill"}, 1),
    "all stop": Case(2, {"rank0": "preempted", "rank1": "preempted"}),
    "late": Case(3, {"rank0": "end", "rank1": "late", "rank2": "end"}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Future[Outcome]]:
    folders = {name: tmp_path_factory.mktemp("run") for name in CASES}
    return together({name: partial(case.outcome, folders[name]) for name, case in CASES.items()})


def test_all_leave_when_one_raises(outcomes: Mapping[str, Future[Outcome]]) -> None:
    ranks = outcomes["raises"].result()
    assert ranks.codes == [72, 73, 72]
    for other in (0, 2):
        assert "error[PEER]: rank 1 failed with NUMERICS: the loss is not finite" in ranks.said[other]
    assert ranks.said[1] == "error[NUMERICS]: the loss is not finite · step 7 · fix: a smaller rate"
    (row,) = rundir.errors(ranks.folder)
    assert (row["rank"], row["code"], row["exit_code"], row["host"]) == (1, "NUMERICS", 73, socket.gethostname())
    assert "BadNumerics" in row["traceback"]
    status = json.loads((ranks.folder / "status.json").read_text())
    assert status["exit_code"] == 73  # of the run: rank 1's, not rank 0's


def test_the_rank_that_holds_the_store_is_heard_too(outcomes: Mapping[str, Future[Outcome]]) -> None:
    ranks = outcomes["rank 0 fails"].result()
    assert ranks.codes == [70, 72, 72]
    assert "rank 0 failed with BUG: ZeroDivisionError: by zero" in ranks.said[1]
    assert [row["rank"] for row in rundir.errors(ranks.folder)] == [0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_missed(outcomes: Mapping[str, Future[Outcome]], victim: int) -> None:
    ranks = outcomes[f"rank {victim} is killed"].result()
    assert ranks.codes == [-9 if r == victim else 72 for r in range(3)]
    assert f"rank {victim} failed with LOST" in ranks.said[2]
    assert {row["rank"] for row in rundir.errors(ranks.folder)} == {victim}


def test_all_that_stop_together_are_no_failure(outcomes: Mapping[str, Future[Outcome]]) -> None:
    ranks = outcomes["all stop"].result()
    assert ranks.codes == [75, 75]
    (row,) = rundir.errors(ranks.folder)
    assert row["code"] == "STOPPED"
    assert json.loads((ranks.folder / "status.json").read_text())["state"] == "stopped"


def test_a_late_rank_is_waited_for(outcomes: Mapping[str, Future[Outcome]]) -> None:
    ranks = outcomes["late"].result()
    assert ranks.codes == [0, 0, 0]
    assert rundir.errors(ranks.folder) == []
    assert json.loads((ranks.folder / "status.json").read_text())["state"] == "done"


class Counting:
    """A store that counts the requests which reach it; torch's `get` waits for the row first, and is two."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        def asked(*what: Any) -> Any:
            self.requests += 2 if name in ("get", "multi_get") else 1
            return getattr(self.store, name)(*what)

        return asked


def test_a_beat_is_three_requests(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    watcher = Watcher(store, 0, 3, tmp_path, lambda: None, pace=Pace(0.05))
    counting = watcher.store.store = Counting(watcher.store.store)  # type: ignore[assignment]
    beats = 0

    def other_beats() -> Any:
        nonlocal beats
        store.set("watch/beat/1", f"{beats}")
        beats += 1
        if beats == 20:
            watcher._over.set()
        return own(beats, 0.05)

    own, watcher._own.next = watcher._own.next, lambda *_: other_beats()  # type: ignore[method-assign, assignment]
    watcher._watch()
    assert beats == 20 and counting.requests == 20 * REQUESTS


@pytest.mark.parametrize("world", [2, 256, 500, 1024, 4096, 65536])
def test_the_store_sees_as_many_requests_a_second_however_many_ranks_there_are(world: int) -> None:
    pace = Pace.of(world)
    assert world * REQUESTS / pace.beat <= MOST
    assert pace.beat == 0.5 or world > 500
    assert pace.timeout >= max(30, 8 * pace.beat) and pace.blame >= 3 * pace.beat
    assert pace.shortest - pace.late >= 2 * pace.beat


class Heard(Watcher):
    """A watcher that keeps what would have ended its process."""

    heard: dict[str, Any] | None = None

    def _leave(self, row: dict[str, Any]) -> None:
        self.heard = row


@contextmanager
def watching(folder: Path, rank: int, world: int) -> Iterator[Heard]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    watcher = Heard(store, rank, world, folder, lambda: None, pace=Pace(0.05, 0.6))
    watcher.start()
    try:
        yield watcher
    finally:
        watcher._over.set()
        time.sleep(0.2)


def until(ready: Any, seconds: float = 8.0) -> bool:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(ready())


def test_silence_is_noticed_and_told_to_all(tmp_path: Path) -> None:
    with watching(tmp_path, 0, 3) as watcher:
        for beat in range(60):  # twice the time-out
            watcher.store.set("beat/1", str(beat))
            time.sleep(0.02)
        assert watcher.heard is None
        assert until(lambda: watcher.heard)
    assert watcher.heard is not None
    assert (watcher.heard["rank"], watcher.heard["code"]) == (1, "LOST")
    assert "no sign of life for 1 s" in watcher.heard["what"]
    assert [row["noticed_by"] for row in rundir.errors(tmp_path)] == [0]


def test_a_rank_that_has_finished_may_be_silent(tmp_path: Path) -> None:
    with watching(tmp_path, 0, 3) as watcher:
        watcher.store.set("done/1", "1")
        assert until(lambda: watcher.heard)
    assert watcher.heard is not None
    assert watcher.heard["rank"] == 2  # whom rank 1 watched


def test_the_guard_notices_a_store_that_does_not_answer(tmp_path: Path) -> None:
    with watching(tmp_path, 1, 2) as watcher:
        watcher.store.get = lambda name: (time.sleep(3), b"")[1]  # type: ignore[method-assign]
        assert until(lambda: watcher.heard, 2.5)
    assert watcher.heard is not None
    assert "store of rank 0 or its launcher is gone: no answer" in watcher.heard["what"]


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistNetworkError("Connection reset by peer"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (BrokenPipeError("stdout is closed"), False),
        (ValueError("NCCL"), False),
    ],
)
def test_what_the_wire_says_is_not_our_own_error(error: Exception, peer: bool) -> None:
    assert is_of_a_peer(error) is peer


def test_no_thread_is_inside_of_the_store_once_a_rank_has_finished(tmp_path: Path) -> None:
    """If one were when the interpreter ends, its way back from C++ would abort the process."""
    with watching(tmp_path, 0, 1) as watcher:
        get, asked = watcher.store.get, threading.Event()

        def slow(key: str) -> Any:
            asked.set()
            time.sleep(0.3)
            return get(key)

        watcher.store.get = slow  # type: ignore[method-assign]
        assert asked.wait(5)
        watcher.finish()
        assert watcher._beats is not None and not watcher._beats.is_alive()

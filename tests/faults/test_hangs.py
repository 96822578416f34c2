"""Real gloo ranks of which one hangs, or enters other collectives: all end in time, and the right rank is named."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forks
from faults.hanging import main
from penteract.engine.run_folder import rundir
from together import together

pytestmark = pytest.mark.waits(18)

LIMIT = 4
START_S = 150  # 28 processes begin together, on two cores: what is measured begins after that
ALL_END_S = LIMIT + 5


class Ranks:
    """Ranks started without a launcher; they are killed at the end."""

    def __init__(self, folder: Path, world: int, orders: dict[str, object]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        place = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        self.folder, self.said = folder, [folder / f"said-{r}" for r in range(world)]
        self.processes = [
            forks.start(
                main, [str(folder), json.dumps(orders)], out=folder / f"out-{r}", err=self.said[r],
                environment=os.environ | {name: str(value) for name, value in (place | {"RANK": r}).items()},
            )
            for r in range(world)
        ]  # fmt: skip

    def codes(self, limit: float, stopped: int | None = None) -> list[int | None]:
        """Exit codes of all but a stopped rank, once they have ended."""
        until = time.monotonic() + limit
        others = [p for r, p in enumerate(self.processes) if r != stopped]
        while any(p.exitcode is None for p in others) and time.monotonic() < until:
            time.sleep(0.02)
        return [p.exitcode for p in others]

    def lines(self) -> list[str]:
        """The error lines of all ranks."""
        return [line for f in self.said for line in f.read_text().splitlines() if line.startswith("error[")]


@contextmanager
def ranks(folder: Path, world: int = 4, limit: int = LIMIT, **orders: str | int) -> Iterator[Ranks]:
    limits = {"step": limit, "save": LIMIT, "data": 600, "validate": 600}
    told: dict[str, object] = {name.removeprefix("rank"): order for name, order in orders.items()}
    started = Ranks(folder, world, told | {"limits": limits})
    try:
        yield started
    finally:
        for p in started.processes:
            p.kill()
            p.join()


def ended(started: Ranks, stopped: int | None = None) -> str:
    """The one line with which all ranks end, in time."""
    end = time.monotonic() + START_S
    while not (started.folder / "hung").exists():
        assert time.monotonic() < end, started.lines()
        time.sleep(0.02)
    codes = started.codes(ALL_END_S + 10, stopped)
    took = time.time() - float((started.folder / "hung").read_text())
    assert set(codes) == {72}, [f.read_text() for f in started.said]
    print(f"{took:.1f} s", *set(started.lines()))
    assert took <= ALL_END_S
    (line,) = set(started.lines())
    assert len(started.lines()) == len(codes)
    rows = rundir.errors(started.folder)
    assert len(rows) == 1 and rows[0]["what"] in line and rows[0]["host"] == socket.gethostname()
    return line


def says(line: str, *words: str) -> None:
    """The line has these words in this order; HOST is this host, and N a few seconds."""
    parts = [re.escape(w).replace("HOST", re.escape(socket.gethostname())).replace("N\\ s", "[3-9]\\ s") for w in words]
    assert re.match(".*?".join(parts), line), line


Outcomes = Mapping[str, Future[tuple[str, Path]]]
FAULTY = {"data": 3, "between": 3, "stop": 2, "save": 1, "extra": 1, "unlike": 1}  # what which rank does


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """(line, folder) of four ranks for each fault, and of those of which one is slow."""

    def with_fault(order: str, rank: int) -> tuple[str, Path]:
        with ranks(folder := tmp_path_factory.mktemp(order), **{f"rank{rank}": order}) as started:
            return ended(started, stopped=rank if order == "stop" else None), folder

    def with_a_slow_one() -> tuple[str, Path]:
        with ranks(folder := tmp_path_factory.mktemp("slow"), rank1="slow") as started:
            assert started.codes(60) == [0, 0, 0, 0], started.lines()
            return "", folder

    faults = {order: partial(with_fault, order, rank) for order, rank in FAULTY.items()}
    return together(faults | {"slow": with_a_slow_one})


@pytest.mark.parametrize(
    ("order", "number", "where"), [("data", 5, "data, step 3"), ("between", 6, "step, step 3, after F0")]
)
def test_a_rank_that_hangs_is_named(outcomes: Outcomes, order: str, number: int, where: str) -> None:
    line, folder = outcomes[order].result()
    says(
        line, f"error[HUNG]: rank 3 (host HOST) has not entered all_reduce #{number} of group dp {{1,3}}; "
        f"rank 1 waits in it since N s; rank 3 is in phase {where}", "--limits.step waits longer",
    )  # fmt: skip
    assert rundir.errors(folder)[0]["culprits"] == [3]


def test_a_stopped_rank_is_named(outcomes: Outcomes) -> None:
    line, _ = outcomes["stop"].result()
    says(
        line, "error[HUNG]: rank 2 (host HOST) gives no sign of life; rank 0 waits in all_reduce #6 of group dp {0,2} "
        "since N s; rank 2 was in phase step, step 3, after F0",
    )  # fmt: skip


def test_a_hung_save_is_named(outcomes: Outcomes) -> None:
    line, _ = outcomes["save"].result()
    says(
        line, "error[HUNG]: rank 1 (host HOST) has not entered barrier #5 of group world {0,1,2,3}; ranks 0, 2, 3 wait "
        "in it since N s; rank 1 is in phase save, step 3, after B0", "--limits.save waits longer",
    )  # fmt: skip


def test_an_extra_collective_names_both(outcomes: Outcomes) -> None:
    """It is like the next one of the other rank, so both go on until their orders differ."""
    line, _ = outcomes["extra"].result()
    says(
        line, "error[UNLIKE]: ranks wait for each other: rank 1 (host HOST) in all_reduce #7 of group dp {1,3} for "
        "rank 3, rank 3 (host HOST) in all_reduce (max) #4 of group world {0,1,2,3} for rank 1; rank 1 is in phase "
        "step, step 3, after F0; rank 3 is in phase step, step 3, after B0",
    )  # fmt: skip


def test_unlike_collectives_name_both(outcomes: Outcomes) -> None:
    line, _ = outcomes["unlike"].result()
    says(
        line, "error[UNLIKE]: ranks entered unlike collectives as #6 of group dp {1,3}: rank 1 (host HOST) all_gather "
        "of 32 B, rank 3 (host HOST) all_reduce of 16 B; rank 1 is in phase step, step 3",
    )  # fmt: skip


def test_a_slow_rank_that_goes_on_is_waited_for(outcomes: Outcomes) -> None:
    _, folder = outcomes["slow"].result()  # 6 s between two collectives: longer than the limit
    assert rundir.errors(folder) == []


# ---- a run as a user starts it -------------------------------------------------------------------------------

SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--parallel.dp=2", "--steps=6",
    f"--limits.step={LIMIT}", f"--limits.save={LIMIT}",
)  # fmt: skip


def _hanging(words: list[str], order: str, mark: str) -> int:
    """`penteract WORDS` whose rank 1 hangs: while it reads a batch, or while it writes its part of a checkpoint (the
    first that it writes has the gradients of step 1)."""
    from penteract.engine.checkpoint import writing
    from penteract.engine.executor.batch_loader import BatchLoader

    at, name = (BatchLoader, "_read") if order == "data" else (writing, "_write_share")
    real, calls = getattr(at, name), [0]

    def hang(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if os.environ.get("RANK") == "1" and calls[0] == (4 if order == "data" else 2):
            Path(mark).write_text(str(time.time()))
            time.sleep(300)
        return real(*args, **more)

    setattr(at, name, hang)
    return forks._command(words, None)


def _ended(order: str, folder: Path) -> tuple[str, float]:
    """The line with which a run ends whose rank 1 hangs, and how many seconds that takes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = forks.start(
        _hanging, ["train", *SMALL, f"--output.folder={folder}"], order, str(folder / "hung"),
        environment=environment, out=folder / "out", err=folder / "err",
    )  # fmt: skip
    process.join(90)
    took = time.time() - float((folder / "hung").read_text())
    try:
        assert process.exitcode == 72, (folder / "err").read_text()
    finally:
        process.kill()
    (line,) = [line for line in (folder / "err").read_text().splitlines() if line.startswith("error[")]
    return line, took


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Future[tuple[str, float]]]:
    return together({order: partial(_ended, order, tmp_path_factory.mktemp(order)) for order in ("data", "save")})


@pytest.mark.parametrize(
    ("order", "kind", "where"),
    [
        ("data", "all_reduce", ("data, step 3, after", "at executor/batch_loader.py:", " in _prefetch")),
        ("save", "barrier", ("save, step 6", "at checkpoint/writing.py:", " in save")),
    ],
)
def test_a_run_that_hangs_ends_in_one_line(
    runs: Mapping[str, Future[tuple[str, float]]], order: str, kind: str, where: tuple[str, ...]
) -> None:
    line, took = runs[order].result()
    says(line, f"error[HUNG]: rank 1 (host HOST) has not entered {kind} #",
         "of group world {0,1}; rank 0 waits in it since N s; rank 1 is in phase ", *where)  # fmt: skip
    assert took <= ALL_END_S

"""Real gloo ranks of which one hangs, or enters other collectives: all end in time, and the right rank is named."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from faults.hanging import main
from penteract.engine.session import rundir

pytestmark = pytest.mark.alone

LIMIT = 4
ALL_END_S = LIMIT + 5
HOST = re.escape(socket.gethostname())


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
def ranks(folder: Path, world: int = 4, **orders: str) -> Iterator[Ranks]:
    limits = {"step": LIMIT, "save": LIMIT, "data": 600, "validate": 600}
    told = {name.removeprefix("rank"): order for name, order in orders.items()}
    started = Ranks(folder, world, told | {"limits": limits})
    try:
        yield started
    finally:
        for p in started.processes:
            p.kill()
            p.join()


def ended(started: Ranks, stopped: int | None = None) -> str:
    """The one line with which all ranks end, in time."""
    end = time.monotonic() + 45
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


WAITED = r"waits in it since [3-9] s"


@pytest.mark.parametrize(("order", "where"), [("data", "phase data, step 3"), ("between", "phase step, step 3, after F0")])
def test_a_rank_that_hangs_is_named(tmp_path: Path, order: str, where: str) -> None:
    with ranks(tmp_path, rank3=order) as started:
        line = ended(started)
    number = 5 if order == "data" else 6
    assert re.match(
        rf"error\[HUNG\]: rank 3 \(host {HOST}\) has not entered all_reduce #{number} of group dp {{1,3}}; "
        rf"rank 1 {WAITED}; rank 3 is in {where}", line,
    )  # fmt: skip
    assert rundir.errors(tmp_path)[0]["culprits"] == [3]


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with ranks(tmp_path, rank2="stop") as started:
        line = ended(started, stopped=2)
    assert re.match(
        rf"error\[HUNG\]: rank 2 \(host {HOST}\) gives no sign of life; rank 0 waits in all_reduce #6 of group dp "
        r"{0,2} since [3-9] s; rank 2 was in phase step, step 3, after F0", line,
    )  # fmt: skip


def test_a_hung_save_is_named(tmp_path: Path) -> None:
    with ranks(tmp_path, rank1="save") as started:
        line = ended(started)
    assert re.match(
        rf"error\[HUNG\]: rank 1 \(host {HOST}\) has not entered barrier #5 of group world {{0,1,2,3}}; "
        r"ranks 0, 2, 3 wait in it since [3-9] s; rank 1 is in phase save, step 3, after B0", line,
    )  # fmt: skip
    assert "--limits.save waits longer" in line


def test_an_extra_collective_names_both(tmp_path: Path) -> None:
    with ranks(tmp_path, rank1="extra") as started:
        line = ended(started)
    assert re.match(r"error\[(UNLIKE|HUNG)\]: ", line)
    assert re.search(r"rank 1 .*rank 3|rank 3 .*rank 1", line)


def test_unlike_collectives_name_both(tmp_path: Path) -> None:
    with ranks(tmp_path, rank1="unlike") as started:
        line = ended(started)
    assert re.match(
        rf"error\[UNLIKE\]: ranks entered unlike collectives as #6 of group dp {{1,3}}: rank 1 \(host {HOST}\) "
        rf"all_gather of 32 B, rank 3 \(host {HOST}\) all_reduce of 16 B; rank 1 is in phase step, step 3", line,
    )  # fmt: skip


def test_a_slow_rank_that_goes_on_is_waited_for(tmp_path: Path) -> None:
    with ranks(tmp_path, rank1="slow") as started:  # 6 s between two collectives: longer than the limit
        assert started.codes(60) == [0, 0, 0, 0], started.lines()
    assert rundir.errors(tmp_path) == []

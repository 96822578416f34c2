"""Runs over several hosts: equal to one host bitwise, also with a slow link, a cut one, or a host that comes back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
from hosts.network import Network, Torchrun, missing, torchrun
from penteract.engine.checkpoint import committed, verify
from run_records import digests, rows_so_far, steps_of

STEPS, LIMIT = 36, 12  # steps of a run, of which a fault comes in the 16th; seconds that a rank may spend in one
SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=10", "--checkpoint.keep=0",
    f"--steps={STEPS}", f"--limits.step={LIMIT}", f"--limits.save={LIMIT}", "--checkpoint.asynchronous=true",
)  # fmt: skip
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
LAYOUTS = {2: ("--parallel.dp=2", "--parallel.zero=1"), 4: ("--parallel.dp=2", "--parallel.tp=2", "--parallel.zero=3")}
_START_S, _END_S = 120.0, 150.0
Whole = tuple[list[Any], dict[str, list[str]]]


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    if why := missing():
        print(f"no hosts can be made here: {why}")
        pytest.skip(f"no hosts can be made here: {why}")


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with Network(2) as network:
        yield network


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Whole]:
    """The run of so many ranks on this host alone, without namespaces."""
    made = dict[int, Whole]()

    def of(world: int) -> Whole:
        if world not in made:
            folder = tmp_path_factory.mktemp("whole")
            done = forks.penteract(["train", *SMALL, *LAYOUTS[world], f"--output.folder={folder}"], ENVIRONMENT)
            assert done.returncode == 0, done.stderr
            made[world] = outcome(folder)
        return made[world]

    return of


def words(folder: Path, world: int) -> list[str]:
    return ["train", *SMALL, *LAYOUTS[world], f"--output.folder={folder / 'runs'}"]


def resumed(folder: Path) -> list[str]:
    return ["train", f"--resume={(folder / 'runs' / 'latest').resolve()}"]


def outcome(folder: Path) -> Whole:
    run = (folder / "latest").resolve()
    newest = committed(run / "checkpoints")[0]
    assert newest.step == STEPS
    verify(newest.at)
    return steps_of(run), digests(newest.at)


def until(run: Torchrun, folder: Path, steps: int) -> None:
    """Wait until the run has done so many steps, and saved a checkpoint."""
    at, end = folder / "runs" / "latest", time.monotonic() + _START_S
    while rows_so_far(at) < steps or not committed(at / "checkpoints"):
        assert time.monotonic() < end and run.processes[0].poll() is None, run.complaints
        time.sleep(0.01)


def errors(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs" / "latest" / "errors.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_are_equal_to_one_host(hosts: int, tmp_path: Path, whole: Callable[[int], Whole]) -> None:
    with Network(hosts) as network, torchrun(network, words(tmp_path, hosts), tmp_path / "said") as run:
        assert run.ended(_END_S) == [0] * hosts, run.complaints
    assert outcome(tmp_path / "runs") == whole(hosts)


def test_a_slow_link_that_is_cut_for_three_seconds_changes_nothing(
    two: Network, tmp_path: Path, whole: Callable[[int], Whole]
) -> None:
    with torchrun(two, words(tmp_path, 2), tmp_path / "said") as run:
        until(run, tmp_path, 11)
        two.slow(1, "100mbit")
        until(run, tmp_path, 16)
        two.link(1, "down")
        time.sleep(3)
        before = rows_so_far(tmp_path / "runs" / "latest")
        two.link(1, "up")
        assert before < STEPS, "the run had ended before its link was cut"
        assert run.ended(_END_S) == [0, 0], run.complaints
    assert outcome(tmp_path / "runs") == whole(2)


def test_a_link_that_is_cut_for_good_ends_both_sides_and_the_run_goes_on_later(
    two: Network, tmp_path: Path, whole: Callable[[int], Whole], note: Callable[[str, float], None]
) -> None:
    at = tmp_path / "runs" / "latest"
    with torchrun(two, words(tmp_path, 2), tmp_path / "said") as run:
        until(run, tmp_path, 16)
        two.link(1, "down")
        cut, held = time.monotonic(), [one.step for one in committed(at / "checkpoints")]
        try:
            assert 0 not in run.ended(LIMIT + 60)
        finally:
            two.link(1, "up")
        took = time.monotonic() - cut
        said = [run.said(i) for i in range(2)]
    note("both_sides_ended_after_s", took)
    assert all("error[" in text for text in said), said
    assert errors(tmp_path)[0]["code"] in ("LOST", "HUNG"), errors(tmp_path)
    for one in committed(at / "checkpoints"):
        verify(one.at)
        assert one.step <= max(held) + 10  # what was under way at the cut, at most
    with torchrun(two, resumed(tmp_path), tmp_path / "again") as run:
        assert run.ended(_END_S) == [0, 0], run.complaints
    assert outcome(tmp_path / "runs") == whole(2)


def test_a_host_that_is_gone_and_comes_back(
    two: Network, tmp_path: Path, whole: Callable[[int], Whole], note: Callable[[str, float], None]
) -> None:
    with torchrun(two, words(tmp_path, 2), tmp_path / "said") as run:
        until(run, tmp_path, 16)
        run.kill(1)
        gone = time.monotonic()
        run.processes[0].wait(LIMIT + 60)
        note("the_other_ended_after_s", time.monotonic() - gone)
        assert "exitcode  : 72" in run.said(0), run.complaints
        (error,) = errors(tmp_path)
        assert "rank 1" in f"{error['what']} {error['where']}", error
    with torchrun(two, resumed(tmp_path), tmp_path / "again") as run:
        assert run.ended(_END_S) == [0, 0], run.complaints
    assert outcome(tmp_path / "runs") == whole(2)

"""Ranks that differ or do not come: each rank says who and what, and nothing is trained."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forks
from penteract.engine.data.description import describe
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.roll_call import RollCall
from penteract.engine.rank.run_key import RunKey
from penteract.engine.rank.signed_store import SignedStore
from penteract.errors import BadInput, PeerLost, PenteractError

pytestmark = pytest.mark.waits(5)

SMALL = ("--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
         "--steps=2", "--parallel.dp=2", "--training.validation_every=0")  # fmt: skip

KEY = RunKey(b"of this run", "127.0.0.1:4000")


def trained(folder: Path, *more: Sequence[str], world: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """A run of `world` ranks, of which as many are started as have words of their own."""
    words = [["train", *SMALL, f"--output.folder={folder / 'runs'}", *own] for own in more]
    return forks.ranks(words, os.environ, world=world)


def test_ranks_of_two_runs_train_neither(tmp_path: Path) -> None:
    rates = [["--optimizer.learning_rate=1e-3"], ["--optimizer.learning_rate=1e-5"]]
    for done in trained(tmp_path, *rates):
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error[RANKS]: the ranks are not alike: optimizer.learning_rate · rank 1 on ")
        assert "found optimizer.learning_rate 1e-05 / allowed 0.001, as on rank 0 on " in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_ranks_whose_data_differ_are_named(tmp_path: Path) -> None:
    for name, size in (("a", 1000), ("b", 1001)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("x" * size)
    for done in trained(tmp_path, *([f"--data.source={tmp_path / n / 't.txt'}"] for n in "ab")):
        assert done.returncode == 2
        assert "not alike: data · rank 1 on " in done.stderr
        assert "data 1 files of 1001 B (" in done.stderr


@pytest.mark.parametrize("there", [0, 1])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, there: int) -> None:
    place = {"RANK": there, "LOCAL_RANK": there, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    if there == 0:
        (done,) = trained(tmp_path, ["--limits.join=1"])
        assert "error[JOIN]: rank 1 of 2 did not join in 1 s · limits.join · found 1 of 2 ranks" in done.stderr
    else:
        words = ["train", *SMALL, f"--output.folder={tmp_path / 'runs'}", "--limits.join=1"]
        done = forks.penteract(words, os.environ | {name: str(value) for name, value in place.items()})
        assert "error[JOIN]: rank 0 does not answer for 1 s" in done.stderr
    assert done.returncode == 72
    assert not (tmp_path / "runs").exists()


def called(rows: Sequence[RollCall]) -> list[PenteractError | None]:
    """What each rank's roll call raised; ranks are threads here."""

    def hold(one: RollCall) -> PenteractError | None:
        try:
            one.hold()
        except PenteractError as e:
            return e
        return None

    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(hold, rows))


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def rank(store: dist.TCPStore, number: int, world: int, *, limit: float = 20.0, **facts: str) -> RollCall:
    host = "abc"[number // 2]
    signed = SignedStore(store.clone(), "roll", number, KEY, strict=True)  # type: ignore[attr-defined]
    return RollCall(signed, number, world, host, facts, limit, per_host=2)


def test_ranks_that_agree_go_on(store: dist.TCPStore) -> None:
    assert called([rank(store, r, 4, torch="2.13") for r in range(4)]) == [None] * 4


def test_the_odd_one_is_named_even_if_it_is_the_first(store: dist.TCPStore) -> None:
    errors = called([rank(store, r, 4, torch="2.12" if r == 0 else "2.13", python="3.11") for r in range(4)])
    assert all(isinstance(e, BadInput) for e in errors)
    (line,) = set(map(str, errors))
    assert line.startswith("error[RANKS]: the ranks are not alike: torch · rank 0 on a · found torch 2.12")
    assert "allowed 2.13, as on rank 1 on a" in line


def places(store: dist.TCPStore, hosts: str, *per_host: int) -> set[str]:
    """What ranks of these hosts, a letter each, are told; "None" if they may train."""
    rows = [rank(store, r, len(hosts)) for r in range(len(hosts))]
    for row, host, each in zip(rows, hosts, per_host, strict=True):
        row.host, row.per_host = host, each
    return set(map(str, called(rows)))


def test_neighbours_on_different_hosts_are_refused(store: dist.TCPStore) -> None:
    """As Slurm numbers tasks with SLURM_DISTRIBUTION=cyclic: tp would cross hosts without a word."""
    (line,) = places(store, "abab", 2, 2, 2, 2)
    assert line == (
        "error[RANKS]: ranks 0 and 1 belong on one host · rank 1 on b · found rank 0 on a / allowed ranks 0 to 1 on "
        "one host (LOCAL_WORLD_SIZE=2) · fix: number ranks host by host: srun --distribution=block, or torchrun; "
        "LOCAL_WORLD_SIZE is how many each host has"
    )


@pytest.mark.parametrize(
    ("hosts", "per_host"),
    [
        ("aaaa", (2, 2, 2, 2)),  # containers with one name, or several launchers of one host
        ("aabb", (0, 0, 0, 0)),  # not known
        ("abab", (0, 0, 0, 0)),
        ("abab", (1, 1, 1, 1)),  # containers of one rank each
        ("aaaab", (4, 4, 4, 4, 1)),  # unlike hosts, the larger first
    ],
)
def test_ranks_that_may_lie_where_they_are(store: dist.TCPStore, hosts: str, per_host: tuple[int, ...]) -> None:
    assert places(store, hosts, *per_host) == {"None"}


def test_missing_ranks_are_named_with_their_hosts(store: dist.TCPStore) -> None:
    errors = called([rank(store, r, 6, limit=0.5) for r in (0, 1, 2)])
    assert all(isinstance(e, PeerLost) for e in errors)
    assert {str(e).split(" · ")[0] for e in errors} == {
        "error[JOIN]: ranks 3 (host b), 4, 5 of 6 did not join in 0 s"
    }  # fmt: skip


def test_a_rank_that_is_there_twice_is_named(store: dist.TCPStore) -> None:
    twice = rank(store, 1, 3)
    twice.host = "c"
    errors = called([rank(store, 0, 3), rank(store, 1, 3), twice])
    assert {str(e).split(" · ")[0] for e in errors} == {"error[RANKS]: two processes are rank 1"}


def test_the_store_is_read_about_twice_for_each_rank(store: dist.TCPStore) -> None:
    """A follower asks for one key, and rank 0 for a row of each: not each rank for all."""
    assert called([rank(store, r, 2) for r in range(2)]) == [None, None]
    assert store.num_keys() <= 2 * 2 + 4  # rows and facts; seen, the answer, read, and one of torch's own


def test_ranks_do_not_wait_for_ever_for_rank_0s_data(store: dist.TCPStore) -> None:
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 has not prepared the data in 0 s · limits.data · fix: --limits.data"):
        Rank(1, 2, torch.device("cpu"), store).first(lambda: None, 0.3)
    assert time.monotonic() - begun < 5


def test_a_description_is_of_names_and_sizes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("same")
    os.utime(tmp_path / "b" / "t.txt", (1, 1))
    one, two = (describe(str(tmp_path / name), "bytes") for name in ("a", "b"))
    assert one == two
    (tmp_path / "b" / "t.txt").write_text("other")
    assert describe(str(tmp_path / "b"), "bytes") != one
    assert describe(str(tmp_path / "none"), "none.json")["data"].startswith("error[SOURCE]: no such data")


def test_a_rank_that_goes_while_ranks_join_is_no_bug() -> None:
    """Found by a drawn kill: rank 0 was killed in its first seconds, and another ended with 70."""
    error = from_exception(dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."))
    assert (error.code, error.exit_code) == ("LOST", 72)
    assert "another rank is gone" in error.what and "got 0 bytes" in error.what

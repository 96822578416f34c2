"""Open files of ranks: as many as were counted; as many as are allowed; and one line where these are too few."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

import forks
from penteract.engine.rank import open_files
from penteract.engine.rank.open_files import OTHERS, allow_files, of_world
from penteract.errors import BadInput

pytestmark = pytest.mark.waits(5)

WORLD = 6


def joins(folder: Path, spare: int) -> int:
    """A rank that joins and watches; it may open `spare` files more than it has, unless it raises that. It leaves how
    many it opened."""
    import torch
    import torch.distributed as dist

    from penteract.engine.rank.rank import join
    from penteract.engine.runtime.watch import Watcher

    torch.set_num_threads(1)
    assert dist.is_gloo_available()  # what is loaded by then has opened its files
    had = len(os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (had + spare, hard))
    rank = join(os.environ, "cpu")
    assert rank.store is not None
    watcher = Watcher(rank.store, rank.number, rank.world, folder, lambda: None)
    watcher.store.set(f"beat/{rank.number}", "1")
    rank.barrier()
    time.sleep(0.3)  # for a socket that has been closed
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (folder / f"{rank.number}.json").write_text(json.dumps([len(os.listdir("/proc/self/fd")) - had, allowed, hard]))
    rank.barrier()
    os._exit(0)


def test_ranks_join_though_few_files_are_allowed_at_first_and_open_what_was_counted(tmp_path: Path) -> None:
    place = {"WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": forks.free_port(), "OMP_NUM_THREADS": 1}
    place |= {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        forks.start(joins, tmp_path, 4, out=tmp_path / f"out-{r}", err=tmp_path / f"err-{r}",
                    environment=os.environ | {name: str(value) for name, value in (place | {"RANK": r}).items()})
        for r in range(WORLD)
    ]  # fmt: skip
    try:
        for r, process in enumerate(ranks):
            process.join(60)
            assert process.exitcode == 0, (tmp_path / f"err-{r}").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for r in range(WORLD):
        opened, allowed, hard = json.loads((tmp_path / f"{r}.json").read_text())
        assert allowed == hard
        most = of_world(WORLD, holds_store=r == 0)
        assert most - 2 <= opened <= most + 6  # what torch loads when it is first used


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[soft, hard], as this process seems to have them."""
    now = [256, 256]

    def lift(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > now[1]:
            raise ValueError("current limit exceeds maximum limit")
        now[0] = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lift)
    return now


def test_a_hard_limit_below_what_the_world_needs_is_refused_in_one_line(
    limit: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "_now", lambda: 20)  # a run of all tests has many files open
    allow_files(8, 0, agents_store=False)
    for rank, other in ((0, 64), (1, 256)):
        with pytest.raises(BadInput) as refused:
            allow_files(other, rank, agents_store=False)
        line = str(refused.value)
        assert line.startswith(f"error[FILES]: {other} ranks need more open files than are allowed · rank {rank} · ")
        assert "found ulimit -n 256 / allowed " in line and "fix: ulimit -n " in line and "\n" not in line
    limit[1] = 1024
    allow_files(64, 0, agents_store=False)
    assert limit[0] == 1024
    allow_files(1, 0, agents_store=False)


def test_a_store_of_torchruns_agent_counts_with_the_limit_that_it_had(limit: list[int]) -> None:
    limit[1] = 65536
    with pytest.raises(BadInput, match=r"torchrun's agent · found ulimit -n 256 / allowed 585 .* before torchrun"):
        allow_files(256, 0, agents_store=True)
    assert of_world(256, holds_store=False) + OTHERS < 585


def test_ranks_that_may_not_open_enough_files_end_with_2(tmp_path: Path) -> None:
    words = ["train", "--preset=tiny", "--parallel.dp=64", "--batch.global_batch_size=64", "--precision.device=cpu",
             "--steps=1", f"--output.folder={tmp_path / 'runs'}"]  # fmt: skip
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "64", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    out, err = tmp_path / "out", tmp_path / "err"
    process = forks.start(limited, words, environment=os.environ | place, out=out, err=err)
    process.join(60)
    assert (process.exitcode, err.read_text().count("\n")) == (2, 1), err.read_text()
    assert err.read_text().startswith("error[FILES]: 64 ranks need more open files than are allowed · rank 0 · found ")
    assert not (tmp_path / "runs").exists()


def limited(words: list[str]) -> int:
    """`penteract WORDS` where 256 files may be open."""
    from penteract.cli import main

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    return main(words)

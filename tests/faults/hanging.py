"""A rank for the tests of hangs: a loop of steps over real groups, in which one rank does what it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 4
AT = 3  # the step of the fault


def main(words: list[str]) -> int:
    """`python hanging.py RUN_DIR JSON`: {"1": "data", "limits": {"step": 3}} tells rank 1 what to do."""
    import torch
    import torch.distributed as dist

    from penteract.config.run import Limits
    from penteract.engine.comm.distributed import Gloo
    from penteract.engine.comm.groups import Round
    from penteract.engine.runtime.hangs.rank_progress import RankProgress
    from penteract.engine.runtime.rank import Rank
    from penteract.engine.runtime.store import open_store
    from penteract.engine.runtime.watch import watched
    from penteract.errors import PenteractError

    folder, orders = Path(words[0]), json.loads(words[1])
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=open_store(os.environ, 60), rank=me, world_size=world)
    store = dist.distributed_c10d._get_default_store()
    rank = Rank(me, world, torch.device("cpu"), store, RankProgress(Limits(**orders["limits"])))
    order = orders.get(str(me), "")
    try:
        with watched(rank, folder):
            comm = Gloo(me, journal=rank.progress.journal)
            half = world // 2
            ranks = tuple(range(me % half, world, half))
            comm.groups.make([Round(tuple(tuple(range(i, world, half)) for i in range(half)))])
            comm._log(comm.groups[ranks], ranks, "dp")
            rank.barrier()
            for number in range(1, STEPS + 1):
                step(number, rank, comm, ranks, order if number == AT else "", folder)
    except PenteractError as e:
        print(e, file=sys.stderr, flush=True)
        return e.exit_code
    dist.destroy_process_group()
    return 0


def step(number: int, rank: object, comm: object, ranks: tuple[int, ...], order: str, folder: Path) -> None:
    import torch

    progress = rank.progress  # type: ignore[attr-defined]

    def hang() -> None:
        if order == "stop":
            time.sleep(1.2)  # so that its last beat is of this step
        (folder / "hung").write_text(str(time.time()))
        if order == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(300)

    def pause(when: str) -> None:
        if order == when:
            hang()

    progress.begin_step(number)
    progress.reading(lambda: pause("data"))
    x, whole = torch.ones(4), torch.ones(4 * len(ranks))
    comm.finish(comm.sum(ranks, x))  # type: ignore[attr-defined]
    progress.did("F0")
    pause("between")
    pause("stop")
    if order == "slow":
        for part in range(4):
            time.sleep(1.5)
            progress.did(f"slow {part}")
    if order in ("extra", "unlike"):
        (folder / "hung").write_text(str(time.time()))
    if order == "extra":
        comm.finish(comm.sum(ranks, x))  # type: ignore[attr-defined]
    if order == "unlike":
        comm.finish(comm.start("all_gather", ranks, x, whole, {}))  # type: ignore[attr-defined]
    else:
        comm.finish(comm.sum(ranks, x))  # type: ignore[attr-defined]
    progress.did("B0")
    rank.largest(x)  # type: ignore[attr-defined]
    if number == AT:
        with progress.during("save"):
            pause("save")
            rank.barrier()  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A rank for the tests of hangs: a loop of steps over real groups, in which one rank does what it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

STEPS = 4
AT = 3  # the step of the fault
PAUSE_S = 2.5  # of a rank that goes on


def main(words: list[str]) -> int:
    """`python hanging.py RUN_DIR JSON`: {"1": "data", "limits": {"step": 3}} tells rank 1 what to do."""
    import torch
    import torch.distributed as dist

    from penteract.config.run import Limits
    from penteract.engine.comm.distributed import Gloo
    from penteract.engine.comm.groups import Round
    from penteract.engine.rank.rank import Rank
    from penteract.engine.rank.rank_progress import RankProgress
    from penteract.engine.rank.store import open_store
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
            at = orders.get("at", AT)
            for number in range(1, at + STEPS - AT + 1):
                step(number, rank, comm, ranks, order if number == at else "", folder)
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


def alone(words: list[str]) -> int:
    """`alone RUN_DIR JSON`: a run of one rank without a process group. {"order": "step", "at": 12, "limits": {…}}."""
    import torch

    from penteract.config.run import Limits
    from penteract.engine.rank.rank import Rank
    from penteract.engine.rank.rank_progress import RankProgress
    from penteract.engine.runtime.watch import watched

    folder, orders = Path(words[0]), json.loads(words[1])
    progress = RankProgress(Limits(**orders["limits"]))
    order, at = orders["order"], orders["at"]
    threading.Thread(target=time.sleep, args=[300], name="a-loader", daemon=True).start()
    with watched(Rank(0, 1, torch.device("cpu"), None, progress), folder):
        progress.enter("data" if order == "preparing" else "compile")
        if order in ("preparing", "compile"):
            hang_alone(folder, order)
        for number in range(1, at + 2):
            progress.begin_step(number, first=number == 1)
            progress.did("F0")
            if number == at and order == "save":
                with progress.during("save"):
                    hang_alone(folder, order)
            elif number == at:
                hang_alone(folder, order)
            time.sleep(0.02)
            progress.did("B0")
    return 0


def hang_alone(folder: Path, order: str) -> None:
    """Hang, or wait for a while and go on."""
    (folder / "hung").write_text(str(time.time()))
    if order in ("goes on", "preparing"):
        time.sleep(PAUSE_S)
    elif order == "traced":  # as pdb does when it stops
        sys.settrace(lambda *_: None)
        sys._getframe().f_trace = lambda *_: None
        time.sleep(2 * PAUSE_S)
        sys.settrace(None)
    elif order == "in C":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    else:
        time.sleep(300)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

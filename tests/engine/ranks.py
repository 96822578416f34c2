"""A rank for the tests of launcher and watcher: joins a gloo world, then does what it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    """`python ranks.py RUN_DIR JSON`: {"1": "raise"} tells rank 1; the others wait in an all-reduce."""
    folder, orders = Path(words[0]), json.loads(words[1])
    me = int(os.environ["RANK"])
    order = orders.get(str(me), "hang")
    if orders.get("early") == me:
        print("error[DEVICE]: no such device", file=sys.stderr)
        return 2
    if "plain" in orders:
        plain(folder, me, orders["plain"])
        return 0
    import torch
    import torch.distributed as dist

    from penteract.engine.rank.rank import Rank
    from penteract.engine.rank.store import open_store
    from penteract.engine.run_folder import rundir
    from penteract.engine.runtime.watch import watched
    from penteract.errors import PenteractError

    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    listener = next((int(word.partition("=")[2]) for word in words[2:]), None)
    dist.init_process_group("gloo", store=open_store(os.environ, 60, listener), rank=me, world_size=world)
    rank = Rank(me, world, torch.device("cpu"), dist.distributed_c10d._get_default_store())
    try:
        with watched(rank, folder, launcher_reports="launched" in orders and me == 0):
            x = torch.ones(4)
            dist.all_reduce(x)
            act(order, x)
    except PenteractError as e:
        if "launched" not in orders or me or not rundir.errors(folder):  # as a worker does
            print(e, file=sys.stderr, flush=True)
        return e.exit_code
    dist.destroy_process_group()
    return 0


def act(order: str, x: object) -> None:
    import torch.distributed as dist

    from penteract.errors import BadNumerics, Preempted

    if order in ("raise", "raise first"):
        time.sleep(1 if order == "raise" else 0.6)
        raise BadNumerics("NUMERICS", "the loss is not finite", where="step 7", fix="a smaller rate")
    if order == "bug":
        time.sleep(1)
        raise ZeroDivisionError("by zero")
    if order == "kill":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if order == "preempted":
        raise Preempted("STOPPED", "stopped after step 3, which is saved")
    if order == "sleep":
        time.sleep(300)
    if order == "late":
        time.sleep(2)
    if order == "hang":
        dist.all_reduce(x)


def plain(folder: Path, me: int, order: str) -> None:
    """Without torch: what the launcher alone does."""
    (folder / f"pid-{me}").write_text(str(os.getpid()))
    (folder / f"env-{me}").write_text(json.dumps(dict(os.environ)))
    if order == "save":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))
        (folder / f"ready-{me}").touch()
        time.sleep(60)
    if order == "unready":  # as an interpreter that has hardly begun: SIGTERM ends it
        (folder / f"ready-{me}").touch()
        time.sleep(60)
    if order == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"ready-{me}").touch()
        if me == 1:
            sys.exit(3)
        time.sleep(60)
    if order == "joining":  # a rank that waits for one that is killed
        from penteract.engine.rank.stopping import Stopping

        with Stopping():
            (folder / f"ready-{me}").touch()
            if me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    if order.startswith("die") and me == 1:
        _, number, *counted = order.split()
        for counter in counted:  # as the kernel does before it kills
            Path(counter).write_text("low 0\noom 3\noom_kill 2\n")
        signal.signal(int(number), signal.SIG_DFL) if int(number) != signal.SIGKILL else None
        os.kill(os.getpid(), int(number))
    print(f"rank {me} says hello")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A run-long pool of gloo ranks: spawned once, each with one thread; groups are made once for each set of ranks."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _serve(rank: int, world: int, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from penteract.engine.comm.groups import Groups

    groups = Groups()
    while (job := inbox.get()) is not None:
        function, arguments = job
        try:
            outbox.put((rank, function(rank, groups, *arguments)))
        except Exception:
            outbox.put((rank, RuntimeError(traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    """`run(f, *args)` calls f(rank, groups, *args) on every rank and gives the answers in rank order."""

    def __init__(self, world: int) -> None:
        context = mp.get_context("spawn")
        self.world = world
        store = str(Path(tempfile.mkdtemp()) / "store")
        self.inboxes = [context.Queue() for _ in range(world)]
        self.outbox: Any = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(r, world, store, self.inboxes[r], self.outbox), daemon=True)
            for r in range(world)
        ]
        for p in self.processes:
            p.start()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        for inbox in self.inboxes:
            inbox.put((function, arguments))
        answers = dict(self.outbox.get(timeout=timeout) for _ in range(self.world))
        for rank in range(self.world):
            if isinstance(answers[rank], RuntimeError):
                raise RuntimeError(f"rank {rank}: {answers[rank]}")
        return [answers[r] for r in range(self.world)]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for p in self.processes:
            p.join(10)
            p.kill()

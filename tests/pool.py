"""A run-long pool of gloo ranks: spawned once, each with one thread; groups are made once for each set of ranks."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GRACE = 3.0  # seconds that the other ranks get to answer once one has failed


@dataclass(frozen=True)
class Failed:
    """A rank's traceback."""

    text: str


def _serve(rank: int, world: int, port: int, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    from penteract.engine.comm.groups import Groups

    groups = Groups()
    while (job := inbox.get()) is not None:
        function, arguments = job
        try:
            outbox.put((rank, function(rank, groups, *arguments)))
        except Exception:
            outbox.put((rank, Failed(traceback.format_exc())))


class Pool:
    """`run(f, *args)` calls f(rank, groups, *args) on every rank and gives the answers in rank order.

    A failed or silent rank raises RuntimeError; as others may then wait for it for ever, all ranks are replaced.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.inboxes: list[Any] = []
        self.outbox: Any = None
        self.processes: list[Any] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.inboxes = [context.Queue() for _ in range(self.world)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(r, self.world, self.store.port, box, self.outbox), daemon=True)
            for r, box in enumerate(self.inboxes)
        ]
        for p in self.processes:
            p.start()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        if not self.processes:
            self.start()
        for inbox in self.inboxes:
            inbox.put((function, arguments))
        answers = self._answers(timeout)
        failed = {a.text: r for r, a in sorted(answers.items(), reverse=True) if isinstance(a, Failed)}
        silent = sorted(set(range(self.world)) - set(answers))
        if failed or silent:
            self.close(patience=0)
            raise RuntimeError(
                "\n".join(f"rank {r}: {text}" for text, r in failed.items())
                or f"ranks {silent} gave no answer in {timeout:g} s"
            )
        return [answers[r] for r in range(self.world)]

    def _answers(self, timeout: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(answers) < self.world:
            try:
                rank, answer = self.outbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            answers[rank] = answer
            if isinstance(answer, Failed):
                until = min(until, time.monotonic() + GRACE)
        return answers

    def close(self, patience: float = 10) -> None:
        """Stop all ranks; the next `run` starts new ones."""
        for inbox in self.inboxes:
            inbox.put(None)
        for p in self.processes:
            p.join(patience)
            p.kill()
            p.join()
        self.processes = []

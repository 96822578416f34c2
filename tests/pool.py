"""A run-long pool of gloo ranks: forked once, each with one thread; groups are made once for each set of ranks."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forks import context
from penteract.spec.layout import Layout

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
    # Only its members make a group, as others have no job. Torch names it by how many were made before: they differ.
    dist.new_group = partial(dist.new_group, use_local_synchronization=True)
    patch.object(distributed_c10d, "_process_group_name", _named_by_ranks).start()
    from penteract.engine.comm.groups import Groups

    groups = Groups()
    while (job := inbox.get()) is not None:
        function, arguments = job
        try:
            outbox.put((rank, function(rank, groups, *arguments)))
        except Exception:
            outbox.put((rank, Failed(traceback.format_exc())))


def _named_by_ranks(ranks: list[int], use_hashed_name: bool) -> str:
    return "-".join(map(str, ranks))


def ranks_of(arguments: Iterable[Any]) -> int:
    """Of the layout that is among `arguments`, or in a case there; of several, the most."""
    layouts = (getattr(a, "layout", a) for a in flattened(arguments))
    return max(a.world for a in layouts if isinstance(a, Layout))


def flattened(arguments: Iterable[Any]) -> Iterator[Any]:
    for a in arguments:
        yield from flattened(a) if isinstance(a, tuple) else (a,)


class Pool:
    """`run(f, *args)` calls f(rank, groups, *args) on each rank of the layout in `args`; the answers in rank order.

    A failed or silent rank raises RuntimeError; as others may then wait for it for ever, all ranks are replaced.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.inboxes: list[Any] = []
        self.outbox: Any = None
        self.processes: list[Any] = []

    def start(self) -> None:
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
        asked = ranks_of(arguments)
        for inbox in self.inboxes[:asked]:
            inbox.put((function, arguments))
        answers = self._answers(asked, timeout)
        failed = {a.text: r for r, a in sorted(answers.items(), reverse=True) if isinstance(a, Failed)}
        silent = sorted(set(range(asked)) - set(answers))
        if failed or silent:
            self.close(patience=0)
            raise RuntimeError(
                "\n".join(f"rank {r}: {text}" for text, r in failed.items())
                or f"ranks {silent} gave no answer in {timeout:g} s"
            )
        return [answers[r] for r in range(asked)]

    def _answers(self, asked: int, timeout: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(answers) < asked:
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

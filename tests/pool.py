"""A run-long pool of gloo ranks: forked once, each with one thread; groups are made once for each set of ranks."""

from __future__ import annotations

import gc
import queue
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from forks import context, ready
from penteract.config.layout import Layout

GRACE = 3.0  # seconds that the other ranks get to answer once one has failed


@dataclass(frozen=True)
class Failed:
    """A rank's traceback."""

    text: str


def share_one_device() -> None:
    """Groups that this process makes from now on share one device of gloo. A device has a thread that wakes a hundred
    times a second for nothing; each group would have its own, and a run of all tests makes a hundred groups."""
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]


def _serve(rank: int, world: int, port: int, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    gc.set_threshold(20_000, 20, 100)  # as in the process of the tests
    share_one_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    from penteract.engine.comm.groups import ProcessGroups

    groups = ProcessGroups()
    while True:
        try:  # a job whose module cannot be imported here is an answer too, not silence
            if (job := inbox.get()) is None:
                return
            function, arguments, others = job
            _keep_count(rank, others)
            answer = function(rank, groups, *arguments)
        except Exception:
            answer = Failed(traceback.format_exc())
        outbox.put((rank, answer, _count()))


def _keep_count(rank: int, others: int) -> None:
    """A group's name is its ranks, and how many a process has: one that had no job makes up for what others made."""
    while _count() < others:
        dist.new_group([rank], use_local_synchronization=True)


def _count() -> int:
    return len(distributed_c10d._world.pg_names)


def ranks_of(arguments: Iterable[Any]) -> int:
    """Of the layout that is among `arguments`, or in a case there; of several, the most; 0 where there is none."""
    layouts = (getattr(a, "layout", a) for a in flattened(arguments))
    return max((a.world for a in layouts if isinstance(a, Layout)), default=0)


def flattened(arguments: Iterable[Any]) -> Iterator[Any]:
    for a in arguments:
        yield from flattened(a) if isinstance(a, tuple) else (a,)


class Pool:
    """`run(f, *args)` calls f(rank, groups, *args) on each rank of the layout in `args`, on all ranks where there is
    none; the answers in rank order.

    A failed or silent rank raises RuntimeError; as others may then wait for it for ever, all ranks are replaced.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.inboxes: list[Any] = []
        self.outbox: Any = None
        self.processes: list[Any] = []
        self.counts: list[int] = []  # groups that each rank has made

    def start(self) -> None:
        ready()
        self.counts = [0] * self.world
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
        asked = ranks_of(arguments) or self.world
        for inbox in self.inboxes[:asked]:
            inbox.put((function, arguments, max(self.counts[:asked])))
        answers = self._answers(asked, timeout)
        failed = {a.text: r for r, a in sorted(answers.items(), reverse=True) if isinstance(a, Failed)}
        silent = sorted(set(range(asked)) - set(answers))
        if failed or silent:
            self.close(patience=0)
            raise RuntimeError(
                "\n".join(f"rank {r}: {text}" for text, r in failed.items())
                or f"ranks {silent} gave no answer in {timeout:g} s"
            )
        assert len(set(self.counts[:asked])) == 1, "ranks have made unlike numbers of groups"
        return [answers[r] for r in range(asked)]

    def _answers(self, asked: int, timeout: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(answers) < asked:
            try:
                rank, answer, count = self.outbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            answers[rank], self.counts[rank] = answer, count
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

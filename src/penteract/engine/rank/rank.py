"""One rank: its number, its device, and operations over all ranks."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from penteract._version import __version__
from penteract.config.run import Limits
from penteract.engine.comm.journal import GroupLog
from penteract.engine.device.device import device_of, pick_device
from penteract.engine.rank.open_files import allow_files
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.rank.roll_call import WARN_S, RollCall
from penteract.engine.rank.run_key import VARIABLE, RunKey
from penteract.engine.rank.signed_store import SignedStore
from penteract.engine.rank.store import agent_holds_store, open_store
from penteract.errors import PeerLost, PenteractError

log = logging.getLogger("penteract")

_PREPARED = "first"
_UNSIGNED = (
    "rows that ranks leave in their store are not signed: who reaches %s can end this run · fix: export "
    '%s="$(openssl rand -hex 32)" for all ranks'
)


@dataclass(frozen=True, slots=True)
class Rank:
    """`number` of `world`; `store` is None when there is one rank. `progress`: how far its main thread is. `key`: what
    signs its rows in the store. `per_host`: ranks of this host; 0: the launcher did not say."""

    number: int
    world: int
    device: torch.device
    store: dist.distributed_c10d.Store | None
    progress: RankProgress = field(default_factory=RankProgress, compare=False)
    key: RunKey = field(default_factory=RunKey, compare=False)
    per_host: int = 0

    def __post_init__(self) -> None:
        if self.world > 1:  # before any use: other ranks look in the journal for who is a member
            _ = self._everyone, self._prepared

    def barrier(self) -> None:
        """Wait for all ranks; does nothing with one rank. On the host: NCCL would ask the store for a communicator of
        its own, which fails once torchrun has ended."""
        if self.world > 1:
            with self._inside("barrier"):
                dist.all_reduce(torch.zeros(1))

    def _inside(self, kind: str) -> AbstractContextManager[None]:
        """Note a collective of all ranks on the host."""
        return self.progress.journal.inside(self._everyone, kind)

    @property
    def _everyone(self) -> GroupLog:
        return self.progress.journal.group(dist.group.WORLD, "world", range(self.world))

    @property
    def _prepared(self) -> GroupLog:
        return self.progress.journal.group(_PREPARED, "all", range(self.world))

    def first(self, task: Callable[[], None], limit: float) -> None:
        """Run a task on rank 0, and then on the others. They wait at the store, not in a collective that would time
        out. Raises PeerLost on them after `limit` seconds (`limits.data`)."""
        if self.store is None:
            return task()
        store = SignedStore(self.store, "penteract", self.number, self.key)
        journal, kind = self.progress.journal, "wait for rank 0's data"
        if self.number == 0:
            line = f"rank 0 prepares the data · the others wait up to {limit:.0f} s (limits.data)"
            late = Timer(WARN_S, lambda: log.warning("%s", line))
            late.daemon = True
            late.start()
            try:
                task()
            finally:
                late.cancel()
            with journal.inside(self._prepared, kind):
                store.set(_PREPARED, "done")
            return None
        try:
            with journal.inside(self._prepared, kind):
                store.wait(_PREPARED, limit)
        except dist.DistStoreError as e:
            raise PeerLost("DATA", f"rank 0 has not prepared the data in {limit:.0f} s", where="limits.data",
                           fix=f"--limits.data {4 * limit:.0f}, or tokenise the text beforehand") from e  # fmt: skip
        return task()

    def largest(self, x: torch.Tensor) -> None:
        """Element-wise maximum of the host tensor x over all ranks, in place."""
        if self.world > 1:
            with self._inside("all_reduce (max)"):
                dist.all_reduce(x, dist.ReduceOp.MAX)

    def leave(self) -> None:
        """Destroy the process groups, after the last communication."""
        if self.world > 1:
            dist.destroy_process_group()

    def broadcast(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        box = [text]
        if self.world > 1:
            with self._inside("broadcast"):
                dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            with self._inside("all_gather"):
                dist.all_gather_object(values, value)
        return values

    def count_here(self) -> int:
        """How many ranks run on this one's host."""
        return self.gather(socket.gethostname()).count(socket.gethostname())

    def one_of(self, error: PenteractError | None) -> PenteractError | None:
        """The error of the first rank that has one, on every rank."""
        return next((e for e in self.gather(error) if e is not None), None)


def join(
    environment: Mapping[str, str],
    device: str,
    facts: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    listener: int | None = None,
    key: RunKey | None = None,
) -> Rank:
    """Join the ranks that a launcher set up in `environment`; without one, the only rank.

    `facts`: what must be equal on all ranks, in addition to their software and devices. `listener`: see `open_store`,
    which owns it. `key`: signs what ranks tell each other. Raises PeerLost if some are missing after `limits.join`
    seconds, BadInput if they differ, or if a stranger has written to their store: on all ranks; BadInput on a rank that
    may not have as many files open as there are ranks to connect to.
    """
    limits = limits or Limits()
    world, number = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    local = int(environment.get("LOCAL_RANK", "0"))
    chosen = pick_device(device, local)
    kind = device_of(chosen)
    per_host = int(environment.get("LOCAL_WORLD_SIZE", "0"))  # 0: not given
    if "OMP_NUM_THREADS" not in environment:
        kind.share(per_host or world)
    allow_files(world, number, agents_store=agent_holds_store(environment))
    if world == 1:
        if listener is not None:
            os.close(listener)
        return Rank(0, 1, chosen, None, RankProgress(limits))
    store = open_store(environment, limits.join, listener)
    own = {"python": platform.python_version(), "torch": torch.__version__, "penteract": __version__}
    own |= {"device": kind.name, **(facts or {})}
    key = key or RunKey()
    RollCall(
        SignedStore(store, "roll", number, key, strict=True),
        number,
        world,
        socket.gethostname(),
        own,
        limits.join,
        per_host=per_host,
    ).hold()
    if number == 0 and not key.secret:
        log.info(_UNSIGNED, key.at, VARIABLE)
    try:
        dist.init_process_group(
            kind.backend, store=store, rank=number, world_size=world, timeout=timedelta(seconds=limits.collective)
        )  # fmt: skip
    except (ValueError, RuntimeError) as e:
        where = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise PeerLost("JOIN", f"the ranks could not connect: {' '.join(str(e).split())[:160]}", where=where,
                       fix="see what the other ranks print, and whether hosts reach each other") from e  # fmt: skip
    return Rank(number, world, chosen, dist.distributed_c10d._get_default_store(), RankProgress(limits), key, per_host)

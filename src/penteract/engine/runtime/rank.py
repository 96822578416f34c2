"""One rank: its number, its device, and operations over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from penteract.engine.executor.device import device_of, pick_device
from penteract.errors import PeerLost, PenteractError


@dataclass(frozen=True, slots=True)
class Rank:
    """`number` of `world`; `store` is None when there is one rank."""

    number: int
    world: int
    device: torch.device
    store: dist.distributed_c10d.Store | None

    def barrier(self) -> None:
        """Wait for all ranks; does nothing with one rank."""
        if self.world > 1:
            dist.barrier()

    def first(self, task: Callable[[], None]) -> None:
        """Run a task on rank 0, and then on the others. They wait at the store, not in a collective that would time
        out."""
        if self.number == 0 or self.store is None:
            task()
        if self.store is not None:
            key = "penteract/first"
            if self.number == 0:
                self.store.set(key, "done")
            else:
                self.store.wait([key], timedelta(days=1))
                task()

    def largest(self, x: torch.Tensor) -> None:
        """Element-wise maximum of the host tensor x over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)

    def leave(self) -> None:
        """Destroy the process groups, after the last communication."""
        if self.world > 1:
            dist.destroy_process_group()

    def agree(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        box = [text]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def one_of(self, error: PenteractError | None) -> PenteractError | None:
        """The error of the first rank that has one, on every rank."""
        errors = [error] * self.world
        if self.world > 1:
            dist.all_gather_object(errors, error)
        return next((e for e in errors if e is not None), None)


def join(environment: Mapping[str, str], device: str) -> Rank:
    """Join the process group that a launcher set up in `environment`; without one, the only rank."""
    world, number = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    local = int(environment.get("LOCAL_RANK", "0"))
    chosen = pick_device(device, local)
    kind = device_of(chosen)
    if "OMP_NUM_THREADS" not in environment:
        kind.share(int(environment.get("LOCAL_WORLD_SIZE", world)))
    if world == 1:
        return Rank(0, 1, chosen, None)
    try:
        dist.init_process_group(kind.backend, rank=number, world_size=world, timeout=timedelta(minutes=10))
    except (ValueError, RuntimeError) as e:
        where = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise PeerLost("JOIN", f"the ranks did not meet: {' '.join(str(e).split())[:160]}", where=where,
                       fix="the same MASTER_ADDR and MASTER_PORT on every rank, and a free port") from e  # fmt: skip
    return Rank(number, world, chosen, dist.distributed_c10d._get_default_store())

"""Open saves in the background, if a run has some: plan the snapshot, find room for it on every host, take it."""

from __future__ import annotations

import json
import logging
import socket

from penteract.config.run import RunSpec
from penteract.engine.checkpoint.background.shared_memory import SharedMemory, supported
from penteract.engine.checkpoint.background.writer import BackgroundWriter
from penteract.engine.device import host_memory
from penteract.engine.rank.rank import Rank
from penteract.engine.session.background.background_saves import BackgroundSaves
from penteract.engine.session.background.snapshot import Snapshot, SnapshotPlan
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadInput
from penteract.units import Bytes, show_bytes

log = logging.getLogger("penteract")


def open_background(
    spec: RunSpec, rank: Rank, trainer: Trainer, checkpoints: Checkpoints, *, saves: int
) -> BackgroundSaves | None:
    """The saves in the background of this rank; None where `checkpoint.asynchronous` is off, or a run of so many
    `saves` has only that at its end, for which it waits anyway. Called by all ranks. Raises BadInput on all of them
    where a host has no memory for its ranks' snapshots."""
    if saves < 2 or not spec.checkpoint.asynchronous:
        return None
    if not supported():
        if rank.number == 0:
            log.info("checkpoints are saved synchronously: this system has no memory that two processes can share")
        return None
    plan = SnapshotPlan(trainer.program, trainer.state)
    refuse_too_large(rank, plan.size)
    memory = SharedMemory.of_size("the snapshot of a checkpoint", max(1, plan.size))
    snapshot = Snapshot(plan, trainer.run.device, memory)
    trainer.run.before_update = snapshot.before_update
    writer = BackgroundWriter(memory, plan.description(checkpoints.threads))
    return BackgroundSaves(checkpoints, snapshot, writer, float(spec.limits.save))


def refuse_too_large(rank: Rank, size: Bytes) -> None:
    """Raise BadInput on all ranks unless each host has room for the snapshots of its ranks. `size`: of this rank's."""
    own = [socket.gethostname(), size, host_memory.available()]
    rows = [json.loads(row) for row in rank.gather(json.dumps(own))]
    for name in sorted({row[0] for row in rows}):
        needs = [row[1] for row in rows if row[0] == name]
        rooms = [row[2] for row in rows if row[0] == name and row[2] is not None]
        if rooms and sum(needs) > min(rooms):
            raise BadInput("MEMORY", f"the snapshots of {len(needs)} ranks do not fit the memory of their host",
                           where=name, found=show_bytes(sum(needs)), allowed=f"{show_bytes(min(rooms))} free",
                           fix="--checkpoint.asynchronous false, or fewer ranks on a host")  # fmt: skip

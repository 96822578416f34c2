"""Who holds memory at the peak of a step: every storage is counted, with an owner from the event that made it.

A run's registers lie in one block, the arena, which shows nothing. So a step runs with a storage for each register.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penteract.engine.device.storages import Storages
from penteract.engine.executor.allocator import Arena, Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.session.trainer import Trainer
from penteract.measure.profile.live_memory import KEPT, LiveMemory
from penteract.measure.profile.record.steps import TrainedSteps
from penteract.measure.schemas.profile import MeasuredMemory
from penteract.ops.spec import Spec
from penteract.step import names
from penteract.step.walk import Silent

_EVENTS = frozenset(name for name in vars(Silent) if not name.startswith("_"))
_WIRES = frozenset(("all_reduce", "post_p2p", "wait_recv", "wait_sends", "wait_all_gather", "reduce", "gather",
                    "replicate", "wait_reduce_scatter", "widen"))  # fmt: skip
_UPDATES = frozenset(("measure", "factors", "update"))


class Ownership:
    """Who asks for memory now: an owner, and the call that is under way. `changed` is called when that changes."""

    def __init__(self, changed: Callable[[str, str], None] = lambda owner, name: None) -> None:
        self.owner, self.name, self.changed = "other", names.BEGIN, changed

    def during(self, owner: str, name: str, work: Callable[[], Any]) -> Any:
        """Do something for an owner."""
        before = self.owner, self.name
        self._set(owner, name)
        try:
            return work()
        finally:
            self._set(*before)

    def _set(self, owner: str, name: str) -> None:
        self.owner, self.name = owner, name
        self.changed(owner, name)


class OwnedRun:
    """A run whose events own what they allocate."""

    def __init__(self, run: Executor, ownership: Ownership) -> None:
        self.run, self.ownership = run, ownership

    def __getattr__(self, event: str) -> Any:
        real = getattr(self.run, event)
        if event not in _EVENTS:
            return real

        def owned(*arguments: Any) -> Any:
            owner, name = _owner(event, arguments)
            return self.ownership.during(owner, name, lambda: real(*arguments))

        return owned


def _owner(event: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
    if event == "call":
        call = arguments[1]
        wire = call.phase in ("start", "finish")
        return "communication" if wire else "workspace", names.of_call(call.phase, call.site)
    owner = "communication" if event in _WIRES else "workspace" if event in _UPDATES else "other"
    return owner, event.replace("_", " ")


@dataclass(slots=True)
class OwnedRegisters(Fresh):
    """A storage for each register. `made` is called with it before anything else can be allocated."""

    ownership: Ownership
    made: Callable[[torch.Tensor, str], None] = lambda tensor, name: None

    def new(self, spec: Spec) -> torch.Tensor:
        """Storage for a register."""
        name = self.ownership.name
        register = self.ownership.during("activations", name, lambda: Fresh.new(self, spec))
        self.made(register, name)
        return register


class OwnedStorages(Storages):
    """Counts storages by owner; those of registers also by the call that made them."""

    def __init__(self, ownership: Ownership) -> None:
        super().__init__()
        self.ownership, self.live = ownership, LiveMemory()

    def _track(self, key: int, storage: Any) -> None:
        super()._track(key, storage)
        self.live.add(key, storage.nbytes(), self.ownership.owner, self.ownership.name)

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self.live.remove(key)


def residents(trainer: Trainer) -> dict[str, int]:
    """Bytes of the storages that are kept between steps, by owner: as they are, not as they were planned."""
    found, counted = dict[str, int](), set[int]()
    for owner, tensors in _kept(trainer).items():
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        found[owner] = sum(size for key, size in sizes.items() if key not in counted)
        counted |= sizes.keys()
    return {owner: size for owner, size in found.items() if size}


def _kept(trainer: Trainer) -> Mapping[str, list[torch.Tensor]]:
    flats, device = trainer.state.flats, trainer.rank.device
    return {
        "parameters": [t for f in flats for t in (f.own_parameter, f.parameter)],
        "gradients": [t for f in flats for t in (f.own_gradient, f.gradient)],
        "optimizer": [t for f in flats for t in f.optimizer_state.values() if t.device.type == device.type],
        "data": [t for batch in trainer.run.micro_batches for t in batch.values()],
        KEPT: trainer.state.resident(),
    }  # fmt: skip


def one_storage_each(trainer: Trainer, ownership: Ownership) -> tuple[Trainer, OwnedRegisters]:
    """The trainer with a storage for each register; the arena is freed, and the given trainer is of no more use."""
    run = trainer.run
    run.settle_parameters()
    memory = OwnedRegisters(trainer.program.precision, trainer.rank.device, ownership)
    fresh = Executor(trainer.program, trainer.state, run.comm, run.kernels, memory, run.optimizer, run.on_action)
    fresh.micro_batches = run.micro_batches
    fresh.counts.copy_(run.counts)
    for arena in (run.memory, trainer.validation_run.memory):
        if isinstance(arena, Arena):
            arena.block, arena.shared = torch.empty(0, dtype=torch.uint8, device=trainer.rank.device), None
    run.registers.fixed.clear()
    run.registers.bound.clear()
    gc.collect()
    return replace(trainer, run=fresh, repeated=None), memory


def measured_on_host(steps: TrainedSteps, pp_rank: int) -> MeasuredMemory:
    """The memory of a CPU's step, counted by torch's dispatcher. The second step is counted: nothing is new in it."""
    ownership = Ownership()
    steps.trainer, _ = one_storage_each(steps.trainer, ownership)
    kept = residents(steps.trainer)
    steps.trainer.observed = lambda run: OwnedRun(run, ownership)
    steps.one()
    with OwnedStorages(ownership) as storages:
        steps.one()
    peak = storages.live.peak
    owners = Counter(kept)
    owners.update(peak.owners)
    return {
        "rank": steps.trainer.rank.number, "pp_rank": pp_rank, "basis": "storages", "peak": owners.total(),
        "at": peak.at, "owners": dict(owners), "reserved": 0, "device": 0, "process": {}, "live": peak.rows(),
        "predicted": 0,
    }  # fmt: skip

"""Registers have the same addresses in every step: what graphs, and transfers that are set up once, rely on."""

from __future__ import annotations

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer
from penteract.ops.spec import Spec

SMALL = ("batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=1", "model.layers=2")


class Watched:
    """An arena that writes down where each new register lies."""

    def __init__(self, memory: object) -> None:
        self.memory, self.seen = memory, list[int]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.memory, name)

    def new(self, spec: Spec) -> torch.Tensor:
        made = self.memory.new(spec)  # type: ignore[attr-defined]
        self.seen.append(made.data_ptr())
        return made


OFFLOADED = ("memory.recompute=full", "memory.offload=layer_inputs")


@pytest.mark.parametrize(("schedule", "more"), [("1f1b", ()), ("gpipe", ()), ("zb_h1", ()), ("gpipe", OFFLOADED)])
def test_addresses_repeat_from_step_to_step(schedule: str, more: tuple[str, ...]) -> None:
    spec = resolve(None, "tiny", [*SMALL, f"parallel.schedule={schedule}", *more]).run
    trainer = Trainer.build(spec, Rank(0, 1, torch.device("cpu"), None))
    samples, _ = open_samples(spec.data, open_tokenizer("bytes"), spec.sequence_length, 0)
    trainer.run.memory = watched = Watched(trainer.run.memory)  # type: ignore[assignment]
    places = []
    for step in (1, 2, 3):
        watched.seen.clear()
        trainer.step(step, samples, (step - 1) * spec.layout.global_batch_size)
        data = [t.data_ptr() for batch in trainer.run.micro_batches for t in batch.values()]
        places.append([*watched.seen, *data])
    assert places[0] == places[1] == places[2]
    assert len(set(watched.seen)) < len(watched.seen) / 2, "temporary activations are used again and again"

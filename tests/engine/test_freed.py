"""A trainer that nobody holds any more is gone at once: its parameters, its arena, its data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.device.storages import Storages
from penteract.engine.rank.rank import Rank
from penteract.engine.session.sample import write
from penteract.engine.session.trainer import Trainer

SMALL = ("batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=1", "model.layers=2")
OTHERS = [
    (),
    ("precision.dtype=fp8_delayed",),
    ("precision.dtype=fp16", "optimizer.kind=muon"),
    ("memory.offload_optimizer=true", "memory.recompute=full", "memory.offload=layer_inputs"),
    ("parallel.schedule=zb_h1", "precision.moments=int8", "kernels.loss=chunked"),
]


@pytest.fixture
def counting() -> Iterator[None]:
    """Reference counts alone free what is not held. What torch imports when a mode is first used fails on the way, and
    such failures hold all that called them until they are collected: it is imported before."""
    with Storages():
        torch.zeros(1).zero_()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    yield from (t for flat in trainer.state.flats for t in (*flat.buffers, *flat.optimizer_state.values()))
    yield from trainer.run.memory.resident()
    yield from (t for batch in trainer.run.micro_batches for t in batch.values())
    yield trainer.run.summed.vector
    yield trainer.validation_run.summed.vector


@pytest.mark.parametrize("words", OTHERS, ids=str)
def test_a_deleted_trainer_frees_what_it_has(counting: None, words: tuple[str, ...]) -> None:
    spec = resolve(None, "tiny", [*SMALL, *words]).run
    samples, validation = open_samples(spec.data, open_tokenizer("bytes"), spec.sequence_length, 0)
    trainer = Trainer.build(spec, Rank(0, 1, torch.device("cpu"), None))
    trainer.step(1, samples, 0)
    trainer.measured_step(2, samples, 4)
    trainer.validate(validation)
    write(trainer, [1, 2, 3], 1)
    alive = [weakref.ref(t.untyped_storage()) for t in tensors(trainer)]
    assert all(ref() is not None for ref in alive), "a storage is one object as long as a tensor has it"
    del trainer
    assert [i for i, ref in enumerate(alive) if ref() is not None] == []


def test_one_that_holds_itself_would_be_seen(counting: None) -> None:
    spec = resolve(None, "tiny", list(SMALL)).run
    trainer = Trainer.build(spec, Rank(0, 1, torch.device("cpu"), None))
    trainer.run.on_action = trainer.run.after  # type: ignore[assignment]
    alive = [weakref.ref(t.untyped_storage()) for t in tensors(trainer)]
    del trainer
    assert any(ref() is not None for ref in alive)

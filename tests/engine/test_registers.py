"""Calls that are bound to their registers do what a first step does, and what cannot be bound is made anew."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.executor import registers as executor_registers
from penteract.engine.executor.registers import Registers
from penteract.engine.kernels.kernel import bound
from penteract.engine.rank.rank import Rank
from penteract.engine.session.trainer import Trainer
from precisions import differ, kept

SMALL = ("batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=1", "model.layers=2")
CASES = {
    "dense": ("tiny", ()),
    "bf16, recomputed, offloaded": (
        "tiny",
        ("precision.dtype=bf16", "memory.recompute=full", "memory.offload=layer_inputs"),
    ),
    "backward in two": ("tiny", ("parallel.schedule=zb_h1",)),
    "experts": ("tiny-moe", ()),
}


def trainer(model: str, more: tuple[str, ...]) -> Trainer:
    spec = resolve(None, model, [*SMALL, *more]).run
    return Trainer.build(spec, Rank(0, 1, torch.device("cpu"), None))


def trained(one: Trainer, steps: int = 3) -> list[float]:
    data = one.spec.data
    samples, _ = open_samples(data, open_tokenizer("bytes"), one.spec.sequence_length, 0)
    size = one.spec.layout.global_batch_size
    losses: list[float] = []
    for n in range(1, steps + 1):
        losses.append(one.step(n, samples, (n - 1) * size).loss)
        if n == 2:
            losses.append(one.validate(samples))
    return losses


@pytest.mark.parametrize("name", CASES)
def test_bound_calls_change_no_bit(name: str) -> None:
    bound, anew = trainer(*CASES[name]), trainer(*CASES[name])
    losses = trained(bound)
    with patch.object(Registers, "complete", lambda self: None):
        assert trained(anew) == losses
    assert not differ(kept(bound.state), kept(anew.state))


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_routed_size_is_bound(name: str) -> None:
    one = trainer(*CASES[name])
    trained(one, 2)
    registers, p = one.run.registers, one.program
    assert registers.reuses_fixed and not registers.values
    calls = [
        (buffer, i.call)
        for action in p.actions
        for buffer, i in p.instructions(action)  # type: ignore[arg-type]
        if i.call.phase not in ("start", "finish")
    ]
    loose = {call.site.op_name for buffer, call in calls if (buffer, call) not in registers.bound}
    assert len(registers.bound) > len(calls) / 2
    assert bool(loose) == (name == "experts"), loose


def test_other_data_or_memory_is_bound_anew() -> None:
    one = trainer(*CASES["dense"])
    trained(one, 2)
    before = next(iter(one.run.registers.fixed.values()))
    one.run.micro_batches = list(one.run.micro_batches)
    trained(one, 1)
    assert not one.run.registers.reuses_fixed and next(iter(one.run.registers.fixed.values())) is not before


def test_after_a_step_that_was_cut_short_all_is_made_anew() -> None:
    one = trainer(*CASES["dense"])
    trained(one, 2)
    with patch.object(type(one.run), "free", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        trained(one, 1)
    trained(one, 1)
    assert not one.run.registers.reuses_fixed and one.run.registers.bound


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_weight_gradients_are_added_where_the_price_says_so(micro_batch_size: int) -> None:
    """Of a step's only micro-batch each is written: plans price no reading of what is there."""
    one = trainer("tiny", (f"batch.micro_batch_size={micro_batch_size}", "model.tied=false"))
    added = set[bool]()

    def observed(phase: object, *about: object) -> object:
        if isinstance(about[-1], bool):  # a weight gradient
            added.add(about[-1])
        return bound(phase, *about)  # type: ignore[arg-type]

    with patch.object(executor_registers, "bound", observed):
        trained(one, 1)
    assert added == ({False, True} if one.spec.layout.adds_gradients else {False})

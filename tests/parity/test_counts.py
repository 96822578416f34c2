"""Targets that the step before told are those that a step would count: the same bits, and nothing on a wire for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draws import further
from layouts import CPU, Case
from observe import Wires
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_counts
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price
from penteract.step.walk import walk
from pool import Pool
from samples import sample
from tiny import SIZES
from training import trainer

DENSE = ModelSpec(**SIZES)
LAYOUTS = [
    (DENSE, Layout(dp=4, zero=1)),
    (replace(DENSE, mtp_layers=2), Layout(dp=2, tp=2, pp=2, gradient_accumulation_steps=2)),
    (DENSE, Layout(dp=2, cp=2, cp_method="ring", zero=3)),
]


def told(rank: int, groups: ProcessGroups, case: Case, steps: int) -> list[str]:
    """What is wrong on this rank."""
    p = case.compile(rank)
    groups.make(needed(p))
    counting, ahead = trainer(case, p, groups), trainer(case, p, groups)
    first = [[samples_of(p, n * case.layout.global_batch_size)] for n in range(steps)]
    drawn = [[[sample(i, p.sequence_length, 64) for i in ids] for ids in some] for [some] in first]
    counts, wrong = [target_counts(p, mine) for mine in drawn], list[str]()
    for n, mine in enumerate(drawn):
        for run in (counting, ahead):
            run.micro_batches = [constants(p, CPU) | micro_batch(p, samples, CPU) for samples in mine]
            run.optimizer.step.fill_(n + 1)  # type: ignore[union-attr]
        counting.counts.copy_(torch.tensor(counts[n]))
        walk(p, counting, targets_counted=False)
        if n == 0:
            ahead.counts.copy_(torch.tensor(counts[n]))
        more = n + 1 < steps
        ahead.summed.next_targets = (lambda n=n: counts[n + 1]) if more else None
        wires = Wires(p.rank)
        with wires.watch():
            walk(p, ahead, targets_counted=n > 0)
        priced = price(p, Recorded(ahead.received), targets_counted=n > 0).wires
        wrong += [f"step {n}: {key} {priced[key]} {wires.bytes[key]}" for key in {*priced, *wires.bytes}
                  if priced[key] != wires.bytes[key]]  # fmt: skip
        if not torch.equal(counting.totals, ahead.totals):
            wrong.append(f"step {n}: totals {ahead.totals.tolist()}, counted {counting.totals.tolist()}")
    return wrong


FEW = [(*LAYOUTS[0], "fp64"), (*LAYOUTS[1], "bf16"), (*LAYOUTS[2], "bf16")]
FURTHER = [(*LAYOUTS[0], "bf16"), (*LAYOUTS[1], "fp64"), (*LAYOUTS[2], "fp64")]


@pytest.mark.parametrize(("model", "layout", "precision"), [*FEW, *further(FURTHER)], ids=str)
def test_a_step_that_was_told_is_one_that_counts(pool: Pool, model: ModelSpec, layout: Layout, precision: str) -> None:
    found = pool.run(told, Case(model, layout, precision=precision), 3)
    assert found == [[]] * layout.world

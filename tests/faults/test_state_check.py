"""A bit flips in one rank's memory: the next check names the rank, and nothing is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given

from draws import draws
from faults.test_saved_state import at_step, session, steps
from layouts import Case, _prepare
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import Moment
from penteract.config.run import Optimizer
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.initial_weights import initialise
from penteract.engine.executor.state_check import _odd, _sum
from penteract.engine.kernels.registry import kernels
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.session.trainer import Trainer
from penteract.engine.state.state import allocate
from penteract.errors import BadNumerics
from penteract.step.program import compile_step
from penteract.step.walk import walk
from pool import Pool
from strategies import cases
from tiny import SIZES

CPU = torch.device("cpu")


def test_any_flipped_bit_changes_the_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        x = torch.randn(37).to(dtype) if dtype != torch.uint8 else torch.randint(0, 256, (37,), dtype=dtype)
        before, data = _sum([x]), x.view(torch.uint8)
        for byte in range(len(data)):
            for bit in range(8):
                data[byte] ^= 1 << bit
                assert _sum([x]) != before, (dtype, byte, bit)
                data[byte] ^= 1 << bit
        assert _sum([x]) == before


@pytest.mark.parametrize(
    ("kind", "value", "flagged"),
    [("mean", "inf", True), ("mean", "nan", True), ("square", "nan", True), ("square", "-1", True),
     ("square", "inf", False)],
)  # fmt: skip
def test_which_moments_show_in_the_weights_that_they_make(kind: Moment, value: str, flagged: bool) -> None:
    """An infinite second moment does not: its weight only decays."""
    p = compile_step(ModelSpec(**SIZES), Layout(), 16, precision="fp32")
    state, optimizer = allocate(p, CPU), AdamW(Optimizer(learning_rate=1e-2), CPU)
    initialise(p, state, 0)
    optimizer.rate.fill_(1e-2)
    flat = next(flat for flat in state.flats if flat.bucket.decay)
    flat.own_gradient.fill_(1e-3)
    flat.moments[kind][5] = float(value)
    before = flat.master.clone()
    optimizer.update(flat, optimizer.factors(torch.tensor(1.0)))
    assert torch.isnan(optimizer.nonfinite).item() == flagged
    if not flagged:
        assert flat.master[5] == before[5] * (1 - 1e-2 * optimizer.spec.weight_decay) and flat.moments[kind][5].isinf()


def test_the_odd_one() -> None:
    assert _odd([7, 7, 7]) == []
    assert _odd([7, 8, 7]) == [1]
    assert _odd([7, 8]) == [0, 1]
    assert _odd([7, 7, 8, 8]) == [0, 1, 2, 3]
    assert _odd([1, 2, 3]) == [0, 1, 2]
    assert _odd([5]) == []


def flipped(rank: int, groups: ProcessGroups, case: Case, odd: int) -> list[list[object]]:
    """What this rank finds after a step, then after a flip on rank `odd`, and what it finds before the next update."""
    p = compile_step(case.model, case.layout, case.sequence_length, rank=rank, precision="fp32")
    groups.make(needed(p))
    run = _prepare(p, groups, kernels(p, CPU))  # type: ignore[arg-type]
    run.optimizer = AdamW(Optimizer(learning_rate=3e-3), CPU, 0, run.state.scaling)
    run.optimizer.rate.fill_(3e-3)
    counts = run.counts.clone()
    found = list[list[object]]()
    for step in range(2):
        run.optimizer.step.fill_(step + 1)
        run.counts.copy_(counts)
        walk(p, run, targets_counted=False)
        run.settle_parameters()
        found.append([*run.check.differing().items()])
        run.check.remember()
    found.append([bool(run.check.compare().isnan())])
    run.check.remember()
    flat = run.state.flats[0]
    if rank == odd:
        flat.master.view(torch.uint8)[3] ^= 64
    found.append([ranks for ranks in run.check.differing().values()])
    alone = len(flat.bucket.replicate_ranks) == 1
    found.append([bool(run.check.compare().isnan()), alone, len(flat.bucket.replicate_ranks)])
    return found


@draws(3, wide=30)
@given(case=cases(max_ranks=8))
def test_layouts_have_no_false_alarm_and_miss_nothing(pool: Pool, case: Case) -> None:
    odd = case.layout.world - 1
    told = pool.run(flipped, case, odd)
    for rank, (first, second, clean, differing, (changed, alone, copies)) in enumerate(told):
        assert first == second == [] and clean == [False], rank
        if rank == odd:
            assert changed == alone
            if copies > 1:
                assert any(odd in ranks for ranks in differing)
            if copies > 2:
                assert [odd] in differing
        else:
            assert not changed


@pytest.mark.parametrize("dtype", ["--precision.dtype=fp32", "--precision.dtype=fp16"])
def test_a_shard_without_a_replica(tmp_path: Path, dtype: str) -> None:
    """With a loss scale it is not taken for an overflow, which would be skipped."""
    made = session(tmp_path, "--training.steps=9", "--training.replica_check_every=3", "--checkpoint.every=4", dtype)

    def flip(trainer: Trainer) -> None:
        trainer.state.flats[0].moments["mean"].view(torch.uint8)[5] ^= 4

    patch = at_step(7, flip)  # step 6 left a sum, step 7 compares it
    try:
        with pytest.raises(BadNumerics, match="changed by itself before the update of step 7") as failed:
            made.go()
    finally:
        patch.undo()
    assert failed.value.exit_code == 73
    assert steps(tmp_path) == [4]

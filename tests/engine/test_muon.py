"""Muon in one process: orthogonal by the SVD, a step as torch makes it, what it allocates, what it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.model import MoESpec
from penteract.config.precision.policy import MOMENT_BLOCK, RECIPES, Policy
from penteract.config.run import Optimizer
from penteract.engine import checkpoint
from penteract.engine.device.storages import Storages, bytes_of
from penteract.engine.optim.muon import orthogonal
from penteract.engine.session.resume import check_resume, resume_settings
from penteract.engine.session.saved import load_state, state_slices
from penteract.errors import BadInput
from penteract.readings.price import resident
from penteract.step import muon, update
from precisions import POLICIES, SMALL, Small, differ, kept
from tolerances import DRIFT, PARITY

MUON = Optimizer(kind="muon", learning_rate=3e-3)
MIXED = replace(SMALL, qkv_bias=True, moe=MoESpec(experts=4, top_k=2, ffn_size=24, dense_layers=(0,)))


def small(policy: Policy, optimizer: Optimizer = MUON, **more: object) -> Small:
    return Small(policy, optimizer=optimizer, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (24, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    short = min(shape)
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    spread = torch.linspace(1, 0.05, short, dtype=torch.float64)  # of largest to smallest
    x = (u * spread @ v).to(dtype)
    room = torch.empty(2 * short * short, dtype=dtype)
    made = orthogonal(x, torch.empty_like(x), room, 5).double()
    inside = u.mT @ made @ v.mT
    assert inside.diag().min() > 0.65 and inside.diag().max() < 1.25
    assert (inside - inside.diag().diag()).abs().max() < (1e-12 if dtype == torch.float64 else 0.06)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_the_one_of_torch(nesterov: bool) -> None:
    """In fp64, as is torch's own without its rounding to bf16."""
    rule = replace(MUON, muon_nesterov=nesterov, weight_decay=0.2, clip_norm=0.0)
    run = small(RECIPES["fp64"], rule)
    matrices = [f for f in run.state.flats if f.bucket.optimizer_kind.by_matrix]
    theirs = {
        q.name: torch.nn.Parameter(f.master[at : at + q.numel(run.trainer.program.mesh)].view(q.shape).clone())
        for f in matrices
        for q, at in zip(f.bucket.params, f.bucket.offsets, strict=True)
    }
    assert set(theirs) == {n for n in run.state.parameters if n.startswith("layers") and "norm" not in n}
    oracle = torch.optim.Muon(
        theirs.values(), lr=3e-3, momentum=0.95, nesterov=nesterov, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    ours = run.trainer.run.optimizer
    assert ours is not None
    ours.rate.fill_(3e-3)
    before = {n: t.detach().clone() for n, t in theirs.items()}
    for step in range(3):
        torch.manual_seed(step)
        for flat in matrices:
            flat.gradient.normal_().mul_(1e-3)
        for part in run.state.parameter_parts("gradient"):
            if part.param.name in theirs:
                theirs[part.param.name].grad = part.values.view(part.param.shape).clone()
        for flat in matrices:
            ours.update(flat, ours.factors(torch.ones((), dtype=torch.float64)))
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            oracle.step()
    for part in run.state.parameter_parts("master"):
        n = part.param.name
        if n in theirs:
            moved = (theirs[n] - before[n]).abs().max()
            error = (part.values.view(part.param.shape) - theirs[n]).abs().max()
            assert moved > 1e-3 and error < PARITY * moved, (n, float(error))


@pytest.mark.parametrize("name", ["fp64", "fp32", *sorted(POLICIES)])
def test_an_update_allocates_what_is_priced_and_keeps_what_is_priced(name: str) -> None:
    policy = (RECIPES | POLICIES)[name]
    run = small(policy, model=MIXED)
    p, flats, ours = run.trainer.program, run.state.flats, run.trainer.run.optimizer
    assert ours is not None
    held = sum(size for kind, size in resident(p).items() if kind != "data")
    assert bytes_of(t for f in flats for t in f.buffers) == held
    norm = torch.ones((), dtype=run.trainer.run.totals.dtype)
    matrices = sorted((f for f in flats if f.bucket.optimizer_kind.by_matrix), key=lambda f: len(f.master))
    largest = {f.bucket.moments: f for f in matrices}
    for flat, size in product(largest.values(), (2 * MOMENT_BLOCK, update.SLICE)):
        ours.update(flat, ours.factors(norm))  # the tables of indices are there from then on
        with patch.object(update, "SLICE", size):
            with Storages() as seen:
                ours.update(flat, ours.factors(norm))
            declared = muon.workspace(flat.bucket, policy)
        few = 256 + declared // 64  # scalars, and the borders of blocks
        assert declared <= seen.peak + few and seen.peak <= declared + few, (size, declared, seen.peak)


def test_it_learns_as_fast_as_adamw_at_the_same_rate() -> None:
    ends = {kind: small(RECIPES["fp32"], replace(MUON, kind=kind), steps=60).losses()[-1] for kind in ("adamw", "muon")}
    assert ends["muon"] <= ends["adamw"]


@pytest.mark.parametrize("name", ["bf16, moments in 8 bits", "bf16_pure"])
def test_a_precision_stays_near_fp32(name: str) -> None:
    exact, near = (small(policy, steps=10).losses() for policy in (RECIPES["fp32"], POLICIES[name]))
    assert exact[-1] < exact[0] - 0.3 and abs(near[-1] / exact[-1] - 1) < DRIFT[30]


def test_an_overflow_moves_nothing() -> None:
    run = small(replace(RECIPES["fp16"], loss_scale=2.0**10, growth_every=2))
    run.step(1)
    before = kept(run.state)
    with patch.object(type(run.trainer.run), "after", _infinite):
        assert run.step(2).skipped
    assert not differ(before, kept(run.state))
    assert not run.step(3).skipped and differ(before, kept(run.state))


def _infinite(run: object, action: object) -> None:
    """In place of `Executor.after`: a gradient that overflowed."""
    next(f for f in run.state.flats if f.bucket.optimizer_kind.by_matrix).gradient[5] = float("inf")  # type: ignore[attr-defined]


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run, again = small(RECIPES["bf16"]), small(RECIPES["bf16"])
    run.step(1)
    _save(tmp_path, run)
    load_state(checkpoint.latest(tmp_path), again.trainer.program, again.state)
    for flat in again.state.flats:
        flat.copy_from_master()
    assert not differ(kept(run.state), kept(again.state))
    assert run.step(2) == again.step(2)


def test_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    """What was kept of matrices would not be there."""
    _save(tmp_path / "checkpoints", small(RECIPES["bf16"]))
    plain = small(RECIPES["bf16"], Optimizer(), layout=Layout(micro_batch_size=4))
    with pytest.raises(BadInput, match=r"RESUME.*adamw.*muon.*--optimizer\.kind \"muon\""):
        check_resume(tmp_path, plain.spec)


def _save(folder: Path, run: Small) -> None:
    slices = state_slices(run.trainer.program, run.state)
    extra = resume_settings(run.spec) | {"step": 1}
    checkpoint.save(folder, 1, slices, extra, rank=0, world=1, barrier=lambda: None)

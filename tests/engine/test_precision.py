"""Recipes on one rank: how near they stay to fp32, what they allocate, what an overflow leaves as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import isfinite
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from penteract.config.model import MoESpec
from penteract.config.precision.policy import MOMENT_BLOCK, RECIPES
from penteract.engine import checkpoint
from penteract.engine.device.storages import Storages, bytes_of
from penteract.engine.optim import optimizer
from penteract.engine.session.saved import load_state, state_slices
from penteract.engine.state.moments import dequantize, quantize
from penteract.readings.price import resident, update_workspace
from penteract.step import update
from precisions import BY_NAME, POLICIES, SMALL, Small, differ, kept, master_weights, patterns
from tolerances import DRIFT

NAMES = sorted(POLICIES)
BALANCED = replace(SMALL, moe=MoESpec(experts=4, top_k=2, ffn_size=24, balance="bias", dense_layers=(0,)))


@cache
def fp32() -> list[float]:
    return Small(RECIPES["fp32"]).losses()


@pytest.mark.parametrize("name", NAMES)
def test_thirty_steps_stay_near_those_of_fp32(name: str) -> None:
    losses = Small(POLICIES[name]).losses()
    assert losses[-1] < losses[0] - 1.5
    assert max(abs(a / b - 1) for a, b in zip(losses, fp32(), strict=True)) < DRIFT[30]


def test_rounding_to_the_nearest_would_lose_updates() -> None:
    """The bound tells a recipe that works from one that does not: late updates are smaller than half a last bit."""
    stuck = Small(POLICIES["bf16_pure"])
    for flat in stuck.state.flats:
        flat.parameter_slices = ()
    assert abs(stuck.losses()[-1] / fp32()[-1] - 1) > DRIFT[30]


@pytest.mark.parametrize("name", ["fp64", "fp32", *NAMES])
def test_an_update_allocates_what_is_priced_and_keeps_what_is_priced(name: str) -> None:
    policy = (RECIPES | POLICIES)[name]
    run = Small(policy)
    p, flats, adamw = run.trainer.program, run.state.flats, run.trainer.run.optimizer
    assert adamw is not None
    held = sum(size for kind, size in resident(p).items() if kind != "data")
    assert bytes_of(t for f in flats for t in f.buffers) == held
    norm = torch.ones((), dtype=run.trainer.run.totals.dtype)
    largest = {f.bucket.moments: f for f in sorted(flats, key=lambda f: len(f.master))}
    for flat, size in product(largest.values(), (2 * MOMENT_BLOCK, update.SLICE)):
        adamw.update(flat, adamw.factors(norm))  # the tables of indices are there from then on
        with patch.object(update, "SLICE", size), patch.object(optimizer, "SLICE", size):
            with Storages() as seen:
                adamw.update(flat, adamw.factors(norm))
            declared = update_workspace(flat.bucket, policy, "reference")
        few = 256 + declared // 64  # scalars, and the borders of blocks
        assert declared <= seen.peak + few and seen.peak <= declared + few, (size, declared, seen.peak)


# ---- an overflow -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_after_an_overflow_all_is_as_without_that_update(moments: str) -> None:
    """Step 3's gradient has one infinity. The other run makes no step 3 at all; its scale is set by hand."""
    policy = replace(RECIPES["fp16"], moments=moments, loss_scale=2.0**10, growth_every=2)
    poisoned, without = Small(policy, model=BALANCED), Small(policy, model=BALANCED)
    for n in (1, 2):
        assert poisoned.step(n) == without.step(n)
    assert poisoned.state.scaling is not None and without.state.scaling is not None
    before = kept(poisoned.state)
    scale = poisoned.state.scaling.values.tolist()
    assert scale == [2.0**11, 0, 0]  # twice, after two steps
    with patch.object(type(poisoned.trainer.run), "after", _infinite):
        outcome = poisoned.step(3)
    assert outcome.skipped and outcome.loss_scale == scale[0]
    assert not differ(before, kept(poisoned.state))
    without.state.scaling.values.copy_(torch.tensor([scale[0] / 2, 0, 1], dtype=torch.float64))
    for n in (4, 5, 6):
        assert poisoned.step(n) == without.step(n)
    assert not differ(kept(poisoned.state), kept(without.state))
    assert differ(before, kept(poisoned.state))
    assert poisoned.state.scaling.values.tolist() == without.state.scaling.values.tolist() == [2.0**11, 1, 1]


def test_the_first_update_is_corrected_as_the_first_after_an_overflow() -> None:
    """Bias correction counts updates: as if training had begun with the second batch."""
    skipped, begun = Small(RECIPES["fp16"]), Small(RECIPES["fp16"])
    with patch.object(type(skipped.trainer.run), "after", _infinite):
        assert skipped.step(1).skipped
    adamw, scaling = begun.trainer.run.optimizer, begun.state.scaling
    assert adamw is not None and scaling is not None
    scaling.values[0] /= 2
    plain = type(adamw).factors

    def first(self: optimizer.AdamW, squared_norm: torch.Tensor) -> optimizer.Factors:
        self.step.fill_(1)
        return plain(self, squared_norm)

    with patch.object(type(adamw), "factors", first):
        begun.step(2)
    skipped.step(2)
    assert not differ(kept(skipped.state), kept(begun.state))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_loss_that_is_not_finite_moves_nothing_though_its_gradient_is(name: str) -> None:
    run = Small(POLICIES[name], model=BALANCED)
    run.step(1)
    before = kept(run.state)
    with patch.object(type(run.trainer.run), "after", _lost):
        assert not isfinite(run.step(2).norm)
    assert not differ(before, kept(run.state))
    run.trainer.run.latch.zero_()  # without a loss scale, nothing would be updated any more
    assert isfinite(run.step(3).norm) and differ(before, kept(run.state))


def _lost(run: object, action: object) -> None:
    """In place of `Executor.after`: a loss that overflowed, of gradients that did not."""
    run.totals[1] = float("inf")  # type: ignore[attr-defined]


def test_a_step_that_is_skipped_leaves_the_history_of_delayed_scales_as_it_was() -> None:
    poisoned, without = Small(POLICIES["fp8_delayed"]), Small(POLICIES["fp8_delayed"])
    for n in (1, 2):
        assert poisoned.step(n) == without.step(n)
    assert poisoned.state.history is not None and without.state.history is not None
    before = poisoned.state.history.steps.clone()
    with patch.object(type(poisoned.trainer.run), "after", _infinite):
        assert not isfinite(poisoned.step(3).norm)
    assert before[:2].all() and torch.equal(before, poisoned.state.history.steps)
    poisoned.trainer.run.latch.zero_()
    assert poisoned.step(4) == without.step(4)
    assert torch.equal(poisoned.state.history.steps, without.state.history.steps)


def _infinite(run: object, action: object) -> None:
    """In place of `Executor.after`: a gradient that overflowed."""
    run.state.flats[-1].gradient[5] = float("inf")  # type: ignore[attr-defined]


def test_a_loss_that_is_too_large_for_fp16_finds_its_scale() -> None:
    policy = replace(RECIPES["fp16"], loss_scale=2.0**30)
    run = Small(policy)
    told = [run.step(n) for n in range(1, 25)]
    skips = [o.skipped for o in told]
    assert skips[0] and not skips[-1]
    assert [o.loss_scale for o in told] == [2.0 ** (30 - sum(skips[:n])) for n in range(len(told))]


# ---- moments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_indices_are_read_as_they_were_written(signed: bool) -> None:
    wide = torch.randn(8 * MOMENT_BLOCK, generator=torch.Generator().manual_seed(1)).mul_(
        torch.logspace(-9, 3, 8 * MOMENT_BLOCK)
    )
    if not signed:
        wide.square_()
    wide[-MOMENT_BLOCK:] = 0
    indices, scales = torch.zeros(len(wide), dtype=torch.uint8), torch.zeros(8)
    quantize(indices, scales, wide.clone(), signed=signed)
    once = dequantize(indices, scales, torch.float32, signed=signed)
    blocks, back = wide.view(8, MOMENT_BLOCK), once.view(8, MOMENT_BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    assert torch.equal(scales[:, None], most)
    decade = blocks.abs() > 0.1 * most
    step = 0.9 / (64 if signed else 128) / 2
    assert ((back - blocks).abs() <= step * most * 1.001)[decade].all()
    assert not back[-1].any()
    if not signed:
        assert (back[:-1] > 0).all()  # or a small second moment would make its step endless
    again, scales_again = torch.zeros_like(indices), torch.zeros_like(scales)
    quantize(again, scales_again, once.clone(), signed=signed)
    assert torch.equal(indices, again) and torch.equal(scales, scales_again)


# ---- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrote",
    ["bf16", "bf16_pure", "fp16", "bf16, moments in 8 bits", "fp8_delayed",
     "bf16, moments in 8 bits but of the embedding, of others in 16 and 32"],
)  # fmt: skip
def test_a_precision_reads_its_own_bit_for_bit(wrote: str, tmp_path: Path) -> None:
    run, again = Small(POLICIES[wrote]), Small(POLICIES[wrote])
    for n in (1, 2):
        run.step(n)
    _save(tmp_path, run)
    load_state(checkpoint.latest(tmp_path), again.trainer.program, again.state)
    for flat in again.state.flats:
        flat.copy_from_master()
    assert not differ(kept(run.state), kept(again.state))
    if run.state.scaling is not None and again.state.scaling is not None:
        assert torch.equal(run.state.scaling.values, again.state.scaling.values)
    if run.state.history is not None and again.state.history is not None:
        assert run.state.history.steps[:2].all()
        assert torch.equal(run.state.history.steps, again.state.history.steps)
    assert run.step(3) == again.step(3)


def test_precisions_read_each_other_rounded_once(tmp_path: Path) -> None:
    run, other = Small(RECIPES["bf16"]), Small(POLICIES["bf16, no master, moments in 8 bits"])
    run.step(1)
    _save(tmp_path, run)
    load_state(checkpoint.latest(tmp_path), other.trainer.program, other.state)
    theirs = master_weights(run.state)
    for part in other.state.parameter_parts("master"):
        assert torch.equal(part.values, theirs[part.param.name].bfloat16())


def test_moments_by_name_are_read_by_others_and_read_theirs(tmp_path: Path) -> None:
    """Once more rounded where they are kept in fewer bits, and exactly where they are not."""
    run, other = Small(BY_NAME), Small(replace(RECIPES["bf16"], modules=patterns("layers.0.*:moments=int8")))
    run.step(1)
    _save(tmp_path, run)
    load_state(checkpoint.latest(tmp_path), other.trainer.program, other.state)
    theirs, ours = moments_of(run), moments_of(other)
    for name, wide in theirs.items():
        close = torch.allclose(ours[name], wide, rtol=0.02, atol=0.02 * wide.abs().max().item())
        assert close if name.startswith("layers.0.") else torch.equal(ours[name], wide), name
    assert isfinite(other.step(2).norm)


def moments_of(run: Small) -> dict[str, torch.Tensor]:
    """The first moments in full precision."""
    slices = state_slices(run.trainer.program, run.state)
    return {s.name: s.tensor.clone() for s in slices if s.name.endswith("/mean")}


def test_what_is_kept_in_fewer_bits_is_widened_and_narrowed_by_slices(tmp_path: Path) -> None:
    """On a device a whole bucket would not fit beside the rest. All storages count here: the wide copies on the CPU,
    and beside them what one slice takes."""
    run = Small(POLICIES["bf16, no master, moments in 8 bits"])
    run.step(1)
    _save(tmp_path, run)
    before, program, shards = kept(run.state), run.trainer.program, [len(f.master) for f in run.state.flats]
    wide, slice_ = 4 * 3 * sum(shards), 4 * 4 * 2 * MOMENT_BLOCK  # the master and two moments; a slice and its indices
    assert max(shards) * 4 > 2 * slice_
    with patch.object(update, "SLICE", 2 * MOMENT_BLOCK):
        with Storages() as seen:
            slices = list(state_slices(program, run.state))
        assert wide <= seen.peak <= wide + slice_
        del slices
        at, plain = checkpoint.latest(tmp_path), checkpoint.load
        with Storages() as seen, patch.object(checkpoint, "load", partial(_after, seen, plain)):
            load_state(at, program, run.state)
        assert seen.peak <= wide + slice_
    assert not differ(before, kept(run.state))


def _after(seen: Storages, load: Callable[..., object], *asked: object) -> object:
    """`checkpoint.load`, and the most that is alive counts anew: it reads whole tensors."""
    extra = load(*asked)
    seen.peak = seen.now
    return extra


def _save(folder: Path, run: Small) -> None:
    slices = state_slices(run.trainer.program, run.state)
    checkpoint.save(folder, 1, slices, {}, rank=0, world=1, barrier=lambda: None)

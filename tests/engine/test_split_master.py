"""Master weights as two halves: exact, and the parameter is the nearest bf16; Triton kernels have the same halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.triton.bits import halves, joined
from penteract.engine.state.split_master import join, rounded, split
from precisions import Small, master_weights

# A number between two of bf16, ties of either sign and parity, the largest, infinities.
CHOSEN = (0x3F801234, 0x3F808000, 0x3F818000, -0x407F8000, -0x407E8000, 0x7F7FFFFF, 0x7F800000, -0x00800000, 0, 1)
PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.sampled_from(CHOSEN), min_size=1, max_size=200)


def values_of(patterns: list[int]) -> torch.Tensor:
    """fp32 numbers with these bits; none is a NaN."""
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    return x.where(~x.isnan(), 1.0)


def halves_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    split(x.clone(), *made)
    return made


@given(PATTERNS)
def test_halves_are_the_whole_and_the_upper_one_is_the_nearest(patterns: list[int]) -> None:
    x = values_of(patterns)
    upper, low = halves_of(x)
    assert torch.equal(join(upper, low).view(torch.int32), x.view(torch.int32))
    alone = torch.empty_like(upper)
    rounded(x, alone)
    assert torch.equal(alone.view(torch.int16), upper.view(torch.int16))
    finite = upper.isfinite() & x.bfloat16().isfinite()
    off, least = (upper.double() - x.double()).abs(), (x.bfloat16().double() - x.double()).abs()
    assert torch.equal(off[finite], least[finite])


@given(PATTERNS)
def test_a_kernel_has_the_same_halves(patterns: list[int]) -> None:
    x = values_of(patterns)
    upper, low = halves_of(x)
    got, size = (torch.empty_like(upper), torch.empty_like(low), torch.empty_like(x)), triton.next_power_of_2(len(x))
    _halves[(1,)](x, *got, len(x), SIZE=size)
    for ours, theirs in zip(got, (upper.view(torch.int16), low, x), strict=True):
        assert torch.equal(ours.view(theirs.dtype), theirs)


def test_what_is_not_finite_stays_so() -> None:
    """Also the NaN of a GPU, whose bits are all ones."""
    x = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    upper, _ = halves_of(x)
    assert upper.isnan()[:2].all() and not upper.isfinite().any()


def test_a_run_has_the_parameters_of_its_master_weights() -> None:
    """After steps too, and each step moves master weights by less than parameters can show."""
    run = Small(RECIPES["bf16"])
    before = master_weights(run.state)
    for n in (1, 2):
        run.step(n)
    after, moved = master_weights(run.state), 0
    for part in run.state.parameter_parts("parameter"):
        wide = after[part.param.name]
        nearest = torch.empty_like(part.values)
        rounded(wide, nearest)
        assert torch.equal(nearest, part.values)
        same = before[part.param.name].bfloat16() == wide.bfloat16()
        moved += int((same & (before[part.param.name] != wide)).sum())
    assert moved > 0


@triton.jit
def _halves(x, upper, low, whole, n, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    a, b = halves(tl.load(x + at, at < n, other=0.0))
    tl.store(upper + at, a, at < n)
    tl.store(low + at, b, at < n)
    tl.store(whole + at, joined(a, b), at < n)

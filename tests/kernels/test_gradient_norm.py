"""The sum of squares by a kernel, in one pass over each shard: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.precision.policy import RECIPES
from penteract.engine.device.storages import Storages
from penteract.engine.kernels.triton.optimizer.sum_of_squares import TILE, Squares
from penteract.engine.optim.gradient_norm import one_pass_squares
from penteract.readings.price import bucket_workspace
from penteract.step.program import compile_step
from penteract.step.update import PARTIAL_SUMS, norm_workspace
from precisions import SMALL

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (1, 7, TILE, 3 * TILE + 48, 5 * TILE + 1)


def shards(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator).to(dtype).to(DEVICE) for n in SIZES]


def total(some: list[torch.Tensor]) -> torch.Tensor:
    squares, out = Squares(), torch.ones((), device=DEVICE)
    for x in some:
        squares.add(x)
    squares.total(out)
    return out - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_squares_of_all_shards_are_summed(dtype: torch.dtype) -> None:
    some = shards(dtype)
    want = sum(x.double().square().sum() for x in some)
    assert total(some).item() == pytest.approx(float(want), rel=1e-6)
    assert torch.equal(total(some), total(some))


def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penteract.engine.kernels.triton.optimizer.sum_of_squares.TILE", 4)
    x = torch.randn(4 * PARTIAL_SUMS * 2 + 18, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert total([x]).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("spoilt", ["inf", "nan"])
def test_what_is_not_finite_is_seen(spoilt: str) -> None:
    some = shards(torch.float32)
    some[3][TILE + 5] = float(spoilt)
    assert not total(some).isfinite()


def test_each_total_begins_anew_and_the_partial_sums_are_declared() -> None:
    squares, some = Squares(), shards(torch.float32)
    with Storages() as seen:
        for x in some:
            squares.add(x)
    policy = RECIPES["bf16"]
    assert seen.peak == norm_workspace(policy, "triton") == 4 * PARTIAL_SUMS
    first, second = (torch.zeros((), device=DEVICE) for _ in range(2))
    squares.total(first)
    squares.total(second)
    assert first > 0 and second == 0


def test_a_layout_chooses_it() -> None:
    layout = Layout(micro_batch_size=4)
    plain, one = (
        compile_step(SMALL, lay, 64, precision=RECIPES["bf16"])
        for lay in (layout, replace(layout, elementwise="triton"))
    )
    assert one_pass_squares(plain) is None and isinstance(one_pass_squares(one), Squares)
    assert bucket_workspace(one.buckets[0], one.precision, "triton") >= 4 * PARTIAL_SUMS
    assert norm_workspace(RECIPES["bf16"], "reference") == 0

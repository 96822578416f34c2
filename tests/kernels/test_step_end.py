"""The end of a step by one kernel has the bits of plain torch: factors, latch, what is done, counts, cleared values."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from kernels.test_update import by_reference
from penteract.config.layout import FUSIONS, Layout
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Optimizer
from penteract.engine.kernels import registry
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.session import trainer
from penteract.step.all_reduces import digits
from precisions import SMALL, Small

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small trainers are on the CPU")
LAYOUT = Layout(micro_batch_size=2, elementwise="triton", fuse=FUSIONS)
MODEL = replace(SMALL, layers=1, z_loss_coefficient=1e-4)


@pytest.fixture(scope="module")
def runs() -> dict[float, Small]:
    """By the norm to clip to."""
    with patch.object(trainer, "check_kernels"), patch.object(registry, "kernel", by_reference):
        return {
            clip: Small(RECIPES["fp8_tensorwise"], MODEL, 4, LAYOUT, Optimizer(clip_norm=clip)) for clip in (0.0, 0.7)
        }


class Gentle(AdamW):
    """With clipping of its own."""

    def clipping(self, squared_norm: torch.Tensor) -> torch.Tensor:
        return torch.full_like(squared_norm, 0.25)


def test_factors_of_another_optimizer_are_its_own() -> None:
    with (
        patch.object(trainer, "check_kernels"), patch.object(registry, "kernel", by_reference),
        patch.object(trainer, "AdamW", Gentle),
    ):  # fmt: skip
        run = Small(RECIPES["fp8_tensorwise"], MODEL, 4, LAYOUT, Optimizer())
    run.step(1)
    assert run.trainer.run.step_end is None
    assert run.trainer.run.common is not None and run.trainer.run.common.gradient == 0.25


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("norm", "loss", "stop", "latch"),
    [(0.0, 5.0, 0, 0.0), (0.09, 5.0, 0, 0.0), (37.1, 5.0, 1, 0.0), (math.inf, 5.0, 0, 0.0), (3.0, math.nan, 0, 0.0),
     (3.0, 5.0, 0, math.nan)],
)  # fmt: skip
def test_a_kernel_ends_a_step_as_torch_does(
    runs: dict[float, Small], norm: float, loss: float, stop: int, latch: float, step: int, clip: float
) -> None:
    run = runs[clip].trainer.run
    adamw, found = run.optimizer, list[list[torch.Tensor]]()
    assert adamw is not None and run.step_end is not None and run.state.largest_weights is not None
    end, table = run.step_end, run.state.largest_weights.table
    for kernel in (end, None):
        run.step_end = kernel
        run.summed.next_targets = lambda: None
        adamw.step.fill_(step)
        adamw.rate.fill_(3e-4 / 7)
        run.done.fill_(step - 1)
        run.latch.fill_(latch)
        run.counts.fill_(-1)
        table[:, 0] = 2.5
        run.totals.copy_(torch.tensor([norm, loss, 0.25, float(stop)]))
        run.summed.digits.copy_(torch.tensor([digits(123_456_789)]))
        run.factors()
        assert run.common is not None
        made = [*run.common, run.totals, run.latch, run.done, run.counts, table]
        found.append([x.clone().view(-1).view(torch.uint8) for x in made])
    run.step_end = end
    assert run.counts.tolist() == [123_456_789]
    different = [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    assert not [i for i in different if i not in (7, 8)]  # of a NaN the bits may differ
    assert torch.equal(found[0][7].view(torch.float32).isnan(), found[1][7].view(torch.float32).isnan())
    assert torch.equal(found[0][8].view(torch.float32).isnan(), found[1][8].view(torch.float32).isnan())

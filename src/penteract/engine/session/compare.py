"""Compare a run with an earlier one: the loss curve, and every parameter's gradient at step 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penteract.engine import checkpoint
from penteract.engine.rank.rank import Rank
from penteract.engine.session.outputs.metrics import read_metrics
from penteract.engine.session.saved import slices
from penteract.engine.session.trainer import Trainer
from penteract.engine.state.state import ParameterPart
from penteract.errors import BadInput
from penteract.units import MIB

LARGEST = 256 * MIB  # larger gradients are not saved: comparing is for models that a laptop can train

_WHERE = "step-1-gradients"


def save_gradients(trainer: Trainer, folder: Path, rank: Rank) -> bool:
    """Save step 1's gradients in the run's folder; False when they are too large."""
    size = sum(math.prod(q.shape) for q in trainer.program.everything) * trainer.program.widths["gradient"]
    if size > LARGEST:
        return False
    checkpoint.save(
        folder / _WHERE, 1, slices(trainer.program, _unclipped(trainer)), {"step": 1},
        rank=rank.number, world=rank.world, barrier=rank.barrier,
    )  # fmt: skip
    return True


def _unclipped(trainer: Trainer) -> Iterator[ParameterPart]:
    """The gradients before clipping that this rank holds summed, one at a time.

    Clipping works in place on gradients in the dtype of the update; these are divided by the clipping factor.
    """
    assert trainer.run.optimizer is not None
    scale = trainer.run.optimizer.clipping(trainer.run.totals[0])
    for part in trainer.state.parameter_parts("gradient"):
        values = part.values
        yield replace(part, values=values / scale if values.dtype == scale.dtype else values)


def load_gradients(trainer: Trainer, folder: Path, rank: Rank) -> float:
    """The largest difference to another run's step-1 gradients, each relative to its parameter's largest element."""
    p = trainer.program
    theirs = [replace(g, values=torch.empty_like(g.values)) for g in trainer.state.parameter_parts("gradient")]
    try:
        checkpoint.load(checkpoint.latest(folder / _WHERE), slices(p, theirs))
    except (OSError, BadInput) as e:
        raise BadInput("COMPARE", "that run has no gradients, or another model's", where="--compare", found=folder,
                       fix="train the first run again with the same model and precision") from e  # fmt: skip
    number = {q.name: i for i, q in enumerate(p.everything)}
    rows = torch.zeros(2, len(number), dtype=torch.float64)  # differences, largest elements
    for our, their in zip(_unclipped(trainer), theirs, strict=True):
        i = number[our.param.name]
        rows[0, i] = (our.values - their.values).abs().max()
        rows[1, i] = their.values.abs().max()
    rank.largest(rows)
    return float((rows[0] / rows[1].clamp(min=1e-30)).max())


@dataclass(slots=True)
class Comparison:
    """The comparison of this run with the one in `folder`. `gradient`: the largest relative difference at step 1."""

    folder: Path
    gradient: float | None = None
    steps: int = 0  # in common

    def result(self, first: int, losses: list[float]) -> dict[str, Any]:
        """The largest absolute difference of the loss over common steps, and the relative one of step 1's gradients.
        `first`: the step of losses[0]."""
        theirs = {row["step"]: row.get("train/loss") for row in read_metrics(self.folder / "metrics.jsonl")}
        pairs = ((x, theirs.get(first + i)) for i, x in enumerate(losses))
        both = [(a, b) for a, b in pairs if isinstance(b, (int, float))]  # a loss that was not finite is null
        self.steps = len(both)
        largest = max((abs(a - b) for a, b in both), default=None)
        return {"max_abs_loss_difference": largest, "max_rel_gradient_difference_step1": self.gradient}

    def line(self, result: dict[str, Any]) -> str:
        """The result as a printed line."""
        loss, gradient = result["max_abs_loss_difference"], self.gradient
        curve = "no step in common" if loss is None else f"{loss:.1e} over {self.steps} steps"
        step1 = "not compared" if gradient is None else f"{gradient:.1e} of each parameter's largest element"
        return f"largest difference to {self.folder.name}: loss {curve} · gradient at step 1 {step1}"

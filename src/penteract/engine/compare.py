"""Hold a run against an earlier one: the loss curve, and every parameter's gradient at step 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine import checkpoint
from penteract.engine.metrics import read_metrics
from penteract.engine.rank import Rank
from penteract.engine.saved import gradient_slices
from penteract.engine.trainer import Trainer
from penteract.errors import BadInput
from penteract.units import MIB

LARGEST = 256 * MIB  # gradients beyond this are not kept: comparing is for models that a laptop trains

_WHERE = "step-1-gradients"


def save_gradients(trainer: Trainer, folder: Path, rank: Rank) -> bool:
    """Keep step 1's gradients in the run's folder; False when they are too large."""
    size = sum(math.prod(q.shape) for q in trainer.program.everything) * trainer.program.widths["stat"]
    if size > LARGEST:
        return False
    slices = gradient_slices(trainer.program, trainer.state, _Unclipped(trainer))
    checkpoint.save(
        folder / _WHERE, 1, slices, {"step": 1}, rank=rank.number, world=rank.world, barrier=rank.barrier, keep=1
    )
    return True


class _Unclipped(Mapping[str, torch.Tensor]):
    """Gradients as they were before clipping scaled them in place, one at a time."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.run.optimizer is not None
        self.scale = trainer.run.optimizer.clipping(trainer.run.totals[0])
        self.clipped = trainer.state.gradients

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.clipped[name] / self.scale.to(self.clipped[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.clipped)

    def __len__(self) -> int:
        return len(self.clipped)


def load_gradients(trainer: Trainer, folder: Path, rank: Rank) -> float:
    """The largest difference to another run's step-1 gradients, each relative to its parameter's largest element."""
    p = trainer.program
    theirs = {n: torch.empty_like(g) for n, g in trainer.state.gradients.items()}
    try:
        checkpoint.load(checkpoint.latest(folder / _WHERE), list(gradient_slices(p, trainer.state, theirs)))
    except (OSError, BadInput) as e:
        raise BadInput("COMPARE", "that run kept no gradients, or another model's", where="--compare", found=folder,
                       fix="train the first run again with the same model and precision") from e  # fmt: skip
    ours, names = _Unclipped(trainer), [q.name for q in p.everything]
    rows = torch.zeros(2, len(names), dtype=torch.float64)  # differences, largest elements
    for i, name in enumerate(names):
        if name in ours:
            rows[0, i] = (ours[name] - theirs[name]).abs().max()
            rows[1, i] = theirs[name].abs().max()
    if rank.world > 1:
        dist.all_reduce(rows, dist.ReduceOp.MAX)
    return float((rows[0] / rows[1].clamp(min=1e-30)).max())


@dataclass(slots=True)
class Comparison:
    """This run beside the one in `folder`."""

    folder: Path
    gradient: float | None = None
    steps: int = 0  # that both runs have

    def result(self, first: int, losses: list[float]) -> dict[str, Any]:
        """Largest absolute loss difference over the steps that both have, and the gradients' of step 1."""
        theirs = {int(str(r["step"])): r["train/loss"] for r in read_metrics(self.folder / "metrics.jsonl")}
        pairs = [(x, theirs[first + i]) for i, x in enumerate(losses) if first + i in theirs]
        self.steps = len(pairs)
        largest = max((abs(a - float(str(b))) for a, b in pairs), default=None)
        return {"max_abs_loss_difference": largest, "max_rel_gradient_difference_step1": self.gradient}

    def line(self, result: dict[str, Any]) -> str:
        """What a person reads."""
        loss, gradient = result["max_abs_loss_difference"], self.gradient
        curve = "no step in common" if loss is None else f"{loss:.1e} over {self.steps} steps"
        step1 = "not compared" if gradient is None else f"{gradient:.1e} of each parameter's largest element"
        return f"largest difference to {self.folder.name}: loss {curve} · gradient at step 1 {step1}"

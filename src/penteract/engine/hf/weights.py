"""Weights to start from: a Hugging Face folder, or one of our checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from penteract.engine import checkpoint
from penteract.engine.checkpoint.boxes import Box
from penteract.engine.checkpoint.manifest import MANIFEST
from penteract.engine.checkpoint.stored import StoredTensors
from penteract.engine.dtypes import dtype_of
from penteract.engine.hf.folder import CONFIG, open_folder
from penteract.engine.hf.reading import HfWeights
from penteract.engine.run_folder import checkpoint_folder
from penteract.engine.state.set_parameters import fill
from penteract.engine.state.state import TrainingState
from penteract.errors import BadInput
from penteract.step.program import Program


class Weights(Protocol):
    """Rectangles of global tensors by our names: parameters, and `…/bias` of routers that balance by a bias."""

    def rectangle(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The box (offset, size) of tensor `name`, on the CPU."""
        ...


def open_weights(path: Path, p: Program) -> Weights:
    """`path`: a folder with config.json, a run's folder (its newest intact step), or a step's.

    Raises BadInput when they are not the weights of this program's model, CorruptData when they are damaged.
    """
    if (path / CONFIG).is_file():
        return HfWeights(open_folder(path, p.model))
    stored = StoredTensors(step_of(path))
    stored.refuse_others({q.name: q.shape for q in p.everything})
    return stored


def step_of(path: Path) -> Path:
    """`path` if it is a step's folder; the newest intact step of a run's folder."""
    if (path / MANIFEST).is_file():
        return path
    if (folder := checkpoint_folder.find(path)).is_dir():
        return checkpoint.latest(folder)
    raise BadInput("WEIGHTS", "no weights here", where=str(path), allowed="a run's folder, or one with config.json",
                   fix="check the path")  # fmt: skip


def start_from(weights: Weights, p: Program, state: TrainingState) -> None:
    """Fill this rank's parameters and master weights, and the biases of its routers, a rectangle at a time."""
    stat = dtype_of("stat", p.precision)
    boxes = ((q, (q.offset(p.mesh, p.rank), q.local_shape(p.mesh))) for q in p.params)
    fill(state, ((q, weights.rectangle(q.name, box, stat)) for q, box in boxes))
    for name, bias in state.biases.items():
        bias.copy_(weights.rectangle(f"{name}/bias", ((0,), tuple(bias.shape)), stat))

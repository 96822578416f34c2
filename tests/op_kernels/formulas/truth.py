"""What a formula is given, and what it says that an op should do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = list[Any]
Rows = int | list[int]  # the first so many, or these


@dataclass
class Truth:
    """What an op should do.

    outs       results, then extras; None: not looked at
    objective  what the gradients are of; None: the sum of out · its gradient
    kept       what backward is given in place of what this forward made (a part of a whole)
    state      the step's sums and counts afterwards
    overwritten  what is left in an input, by its number
    rows       of tensors by name, which of their rows are defined; of others, all
    overflows  whether the step is void, as there are more rows than a block has room for
    """

    outs: Tensors
    objective: torch.Tensor | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    overwritten: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    overflows: bool = False


@dataclass(frozen=True)
class Room:
    """What a formula knows beside its tensors."""

    attrs: Mapping[str, Any]
    index: int  # this rank's place along the op's axis
    beside: Tensors  # what other ranks hold
    scale: torch.Tensor
    bias: torch.Tensor
    gradients: Tensors  # of the outs that have one
    compute: torch.dtype = torch.float64  # of activations, where their rounding decides more than last bits


Formula = Callable[[Room, Tensors, Tensors], Truth]

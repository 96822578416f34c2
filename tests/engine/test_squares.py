"""The sum of squares of a gradient that torch's dot product cannot count is added from parts."""

from __future__ import annotations

import pytest
import torch

from penteract.engine.optim import gradient_norm


@pytest.mark.parametrize("part", [1, 7, 64, 100])
def test_parts_add_up(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    x = torch.arange(1, 101, dtype=torch.float64)
    whole = gradient_norm.squares(x, torch.float64)
    monkeypatch.setattr(gradient_norm, "_DOT", part)
    assert gradient_norm.squares(x, torch.float64) == whole == 338_350
    assert gradient_norm.squares(x, torch.float64).shape == ()

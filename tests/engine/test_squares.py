"""The sum of squares of a gradient that torch's dot product cannot count is added from parts."""

from __future__ import annotations

import pytest
import torch

from penteract.engine.executor import executor


@pytest.mark.parametrize("part", [1, 7, 64, 100])
def test_parts_add_up(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    x = torch.arange(1, 101, dtype=torch.float64)
    whole = executor._squares(x, torch.float64)
    monkeypatch.setattr(executor, "_DOT", part)
    assert executor._squares(x, torch.float64) == whole == 338_350
    assert executor._squares(x, torch.float64).shape == ()

"""The factor at which a rival wins is the nearest to 1, on whichever side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penteract.planner.report.what_if import _bisect


@pytest.mark.parametrize(
    ("wins", "factor"),
    [
        (lambda f: f > 3, 3.0),
        (lambda f: f < 1 / 3, 1 / 3),
        (lambda f: f > 6 or f < 0.8, 0.8),
        (lambda f: f > 1.3 or f < 0.2, 1.3),
    ],
)
def test_the_nearest_side_is_told(wins: Callable[[float], bool], factor: float):
    found = _bisect(wins)
    assert found is not None
    assert wins(found)
    assert max(found / factor, factor / found) < 8 ** (1 / 16) * 1.0001  # four halvings of the way, in logarithms


def test_out_of_reach_is_none():
    assert _bisect(lambda f: f > 9) is None

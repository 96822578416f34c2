"""Sessions of tests collect what they have made alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_heap(small_heap: None) -> None:
    """Each test's own."""

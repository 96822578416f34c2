"""Sessions collect garbage in the process of the tests: of what their test has made, not of all that is loaded."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_heap(small_heap: None) -> None:
    """See small_heap."""

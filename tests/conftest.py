"""What all tests share: one pool of ranks, and how hypothesis draws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from pool import Pool

# `pytest --hypothesis-profile=ci`: the same draws every time. Otherwise new ones, and failures are remembered.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None)
settings.load_profile("local")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks for the whole run, started by the first test that runs something on them."""
    ranks = Pool(8)
    yield ranks
    ranks.close()

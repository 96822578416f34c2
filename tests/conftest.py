"""What all tests share: shards, one pool of ranks, how hypothesis draws, and what runs kernels without a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from draws import TIMES, USUAL
from heap import frozen
from in_memory import use_memory
from pool import Pool

pytest_plugins = ["shards", "browsers"]

use_memory()

# `pytest --hypothesis-profile=ci`: the same draws every time. `wide`: more of those
# that `draws` counts, by a seed. Otherwise new ones, and failures are remembered.
# None looks at a clock: that drawing takes long says how busy the machine is.
CLOCKLESS: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, database=None, print_blob=True, **CLOCKLESS)
settings.register_profile("wide", max_examples=TIMES * USUAL, database=None, print_blob=True, **CLOCKLESS)
settings.register_profile("local", **CLOCKLESS)
settings.load_profile("local")

# Triton's interpreter must be chosen before any test imports something of Triton, and torch's own parts do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Shards, ranks and runs share the cores: a second thread of one waits for it at the cost of another.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# By default, the garbage collector looks at new values after every 700, and often at all that pytest and torch have
# loaded: a quarter of the time of tests that plan. What is in no cycle is freed at once as ever.
gc.set_threshold(20_000, 20, 100)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """A test that collects, or has a session that does, looks at what it has made: the heap of the whole run takes half
    a second each time."""
    with frozen():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks for the whole run, started by the first test that runs something on them."""
    ranks = Pool(8)
    yield ranks
    ranks.close()

"""The best that a device does: a large product, and a copy, for a moment each."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penteract.config.precision.policy import Policy
from penteract.engine.dtypes import dtype_of
from penteract.measure.schemas.profile import Ceilings

_SECONDS = 0.3
_SIZES = {"cuda": (8192, 2**30), "cpu": (768, 2**25)}  # of a square matrix; bytes of a copy


def ceilings(device: torch.device, precision: Policy) -> Ceilings:
    """FLOP/s of a product in the compute dtype, and bytes/s that a copy reads and writes."""
    dtype, (n, size) = dtype_of("compute", precision), _SIZES[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    x = torch.empty(size, device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    product = _rate(lambda: torch.mm(a, b, out=out), device)
    copied = _rate(lambda: y.copy_(x), device)
    return {"dtype": str(dtype).removeprefix("torch."), "product": 2 * n**3 * product, "copy": 2 * size * copied}


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """How often a second: of the fastest of five equal batches that take `_SECONDS` in all, after one that warms up."""
    took, count = _batch(work, 1, device), 1
    count = max(1, int(_SECONDS / 5 / max(took, 1e-7)))
    return max(count / _batch(work, count, device) for _ in range(5))


def _batch(work: Callable[[], object], count: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun

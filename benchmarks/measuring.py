"""How the scripts for one GPU time what they run, and go on where a part of it fails."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

WARM, TIMES = 3, 10


def seconds(run: Callable[[], Any], device: str = "cuda") -> float:
    """Median of ten, each between events, after three that do not count; of one on a CPU."""
    if device != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    took: list[float] = []
    for _ in range(WARM + TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1e-3)
    return median(took[WARM:])


def told(name: str, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each part returns; one that fails leaves its traceback, and the rest goes on."""
    begun, found = time.perf_counter(), dict[str, Any]()
    for part, measured in parts.items():
        try:
            found[part] = measured()
        except Exception:
            found[part] = {"failed": traceback.format_exc()}
            print(name, part, found[part]["failed"], file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {**found, "took": time.perf_counter() - begun}

"""Helpers of the scripts for one GPU: timing, and running several parts of which some may fail."""

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
    """Seconds of a run: on a GPU the median of ten, by CUDA events, after three to warm up; on a CPU one run."""
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


def run_parts(name: str, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The results of all parts. A part that fails gives its traceback instead; the other parts still run."""
    begun, found = time.perf_counter(), dict[str, Any]()
    for part, measure in parts.items():
        try:
            found[part] = measure()
        except Exception:
            found[part] = {"failed": traceback.format_exc()}
            print(name, part, found[part]["failed"], file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {**found, "took": time.perf_counter() - begun}

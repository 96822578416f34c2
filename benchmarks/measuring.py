"""Helpers of the scripts for one GPU: timing, and running several parts of which some may fail."""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import hexadecimal

WARM, TIMES = 3, 10


def form_options(description: str) -> argparse.ArgumentParser:
    """The command line of a script that compares ways to compile a kernel."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", type=hexadecimal, default="")
    parser.add_argument("--device", default="cuda")
    return parser


def measured_on(args: argparse.Namespace) -> dict[str, Any]:
    """How such a script's record begins."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return {"commit": args.commit, "device": name, "torch": torch.__version__}


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

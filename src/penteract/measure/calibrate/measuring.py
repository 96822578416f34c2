"""A calibration: workload after workload until the budget is spent, then the file."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penteract._version import __version__
from penteract.engine.doctor.machine import GpuState
from penteract.engine.doctor.probe.gpus import gpus
from penteract.engine.rank.failures import lacks_memory
from penteract.measure.calibrate.hardware_file import hardware_file
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.links.link_tables import link_spread, measured_devices
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows
from penteract.measure.calibrate.workloads import Workload, workloads

Said = Callable[["CalibrationState"], None]


class CalibrationState(NamedTuple):
    """How far a calibration is: workloads done of `all`, the one to come, seconds since it began and seconds left."""

    done: int
    all: int
    key: Key
    seconds: float
    left: float


class Calibrated(NamedTuple):
    """`text`: the hardware file. `skipped`: workloads that failed here. `missing`: those that the budget left out."""

    text: str
    measured: int
    skipped: int
    missing: int


def calibrate(
    out: Path, budget: float, said: Said, device: torch.device | None = None, links: Sequence[Key] = ()
) -> Calibrated:
    """Measure a device for about `budget` seconds. Rows go to a file next to `out`; those in it are not repeated.
    `links`: the keys of rows that ranks have written there, or were to."""
    device = device or device_here()
    rows = MeasuredRows.of(rows_path(out), versions(device))
    every = workloads(device)
    measure(every, rows, HotClock(device), budget, said)
    about = provenance(device) | link_provenance(rows)
    text, keys = hardware_file(rows, device, about), [*(w.key for w in every), *links]
    found = [rows.rows[key] for key in keys if key in rows.rows]
    return Calibrated(text, len(found), found.count(None), len(keys) - len(found))


def device_here() -> torch.device:
    """The device that is measured: a GPU if torch sees one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_path(out: Path) -> Path:
    """Where the rows of a hardware file are kept."""
    return out.with_suffix(".rows.jsonl")


def measure(every: Sequence[Workload], rows: MeasuredRows, clock: HotClock, budget: float, said: Said) -> None:
    """Measure what has no row yet, in order; once the budget is spent, only what every file needs."""
    todo, begun = [w for w in every if w.key not in rows.rows], time.monotonic()
    for i, workload in enumerate(todo):
        seconds = time.monotonic() - begun
        if seconds > budget and not workload.needed:
            continue
        left = seconds / i * (len(todo) - i) if i else budget
        said(CalibrationState(len(every) - len(todo) + i, len(every), workload.key, seconds, min(left, budget)))
        rows.add(workload.key, _one(workload, clock))


def _one(workload: Workload, clock: HotClock) -> float | None:
    """Microseconds; None where the device has too little memory, or the library refuses the shape. A GPU's memory is
    freed only where it is short, for torch or for a library: meanwhile the GPU would cool down."""
    try:
        return workload.microseconds(clock)
    except RuntimeError as error:  # torch's own and a library's, NotImplementedError too
        if not lacks_memory(error):
            return None
    gc.collect()  # here, where no traceback keeps what the workload had made
    torch.cuda.empty_cache()
    try:
        return workload.microseconds(clock)
    except RuntimeError:
        return None


def versions(device: torch.device) -> dict[str, str]:
    """What a measured time depends on: the device, and the libraries that compute."""
    about = {"device": "cpu", "penteract": __version__, "torch": torch.__version__}
    if device.type != "cuda":
        return about | {"threads": str(torch.get_num_threads())}
    cudnn = {"cudnn": str(torch.backends.cudnn.version())}
    return about | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or "", **cudnn}


def provenance(device: torch.device) -> dict[str, str]:
    """The versions, the date, the commit of the package if it lies in a repository, clocks and power of the GPU."""
    found = {**versions(device), "date": time.strftime("%Y-%m-%d"), "statistic": "median"}
    if commit := git("rev-parse", "--short", "HEAD"):
        found["commit"] = commit + ("-dirty" if git("status", "--porcelain", "--", ".") else "")
    if device.type == "cuda" and (state := _state(device)) is not None:
        found |= {k: str(v) for k, v in (
            ("clock_mhz", state.clock), ("clock_most_mhz", state.clock_most), ("power_limit_w", state.power_limit),
        ) if v is not None}  # fmt: skip
    return found


def link_provenance(rows: MeasuredRows) -> dict[str, str]:
    """Of measured links: how many ranks, by which library and settings of it, and how far rounds lie apart."""
    if not (ranks := measured_devices(rows)):
        return {}
    found = {"link_ranks": str(ranks), "link_spread": link_spread(rows)}
    if rows.about["device"] == "cpu":
        return found | {"link_backend": "gloo"}
    version: tuple[int, ...] = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    settings = " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_"))
    multicast = "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "on"
    return found | {"nccl": ".".join(map(str, version)), "nvls_multicast": multicast, "nccl_settings": settings}


def _state(device: torch.device) -> GpuState | None:
    """What the driver says about the GPU, found by its UUID."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    devices = gpus(None).devices
    return next((d for d in devices if uuid and uuid in d.uuid), devices[0] if len(devices) == 1 else None)


def git(*arguments: str) -> str:
    """The answer of git about the package's own folder; empty without git, or outside of a repository."""
    try:
        asked = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()

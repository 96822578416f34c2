"""A hardware file of the few workloads that each needs, for a device that no file and no catalogue describes."""

from __future__ import annotations

from pathlib import Path

import torch

from penteract.measure.calibrate.hardware_file import catalogued, hardware_file
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.measured_rows import MeasuredRows
from penteract.measure.calibrate.measuring import measure, provenance, rows_path, versions
from penteract.measure.calibrate.workloads import workloads

FILE = "short.toml"


def calibrate_shortly(folder: Path, device: torch.device, products: str) -> None:
    """Measure the needed workloads, and matrix products of the run's dtype; nothing where the catalogue has curves."""
    if device.type == "cuda" and catalogued(torch.cuda.get_device_name(device)):
        return
    out = folder / FILE
    rows = MeasuredRows.of(rows_path(out), versions(device))
    every = [w for w in workloads(device) if w.needed or w.key[:2] == ("product", products)]
    measure(every, rows, HotClock(device), float("inf"), lambda state: None)
    out.write_text(hardware_file(rows, device, provenance(device)), encoding="utf-8")

"""A minute's look at all devices of a host: which is slower than its file, and which link than the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from penteract.errors import BadInput
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows
from penteract.measure.calibrate.measuring import rows_path
from penteract.measure.calibrate.workloads import Workload, workloads

SLOWER = 1.05  # times as long as in the file: more than a hot device differs from itself
LINK_SLOWER = 1.1  # times as long as the median link
_EACH = 3  # workloads of a kind
_COPIED = 2**28  # bytes between two devices


class DeviceCheck(NamedTuple):
    """Times of a device over those of the file, by workload."""

    name: str
    ratios: Mapping[Key, float]

    @property
    def middle(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios.values())

    @property
    def slow(self) -> bool:
        """Whether the device is slower than its file."""
        return self.middle > SLOWER

    @property
    def worst(self) -> tuple[Key, float]:
        """The workload that takes longest, compared with the file."""
        return max(self.ratios.items(), key=lambda one: one[1])


class LinkCheck(NamedTuple):
    """GB/s of copies from one device to another, and whether others are faster."""

    source: int
    target: int
    rate: float
    slow: bool


def check_devices(file: Path, budget: float, devices: Sequence[torch.device] | None = None) -> list[DeviceCheck]:
    """Each device of this host, in about `budget` seconds together. Raises BadInput for a file without its rows, and
    for one of other workloads."""
    devices = devices or all_devices()
    if not rows_path(file).is_file():
        raise BadInput("CALIBRATION", "the rows that the file was made of are missing", where=str(rows_path(file)),
                       fix=f"penteract calibrate --out {file}")  # fmt: skip
    found = MeasuredRows.any_machine(rows_path(file))
    return [_checked(device, found, budget / len(devices)) for device in devices]


def all_devices() -> list[torch.device]:
    """The GPUs that this process sees, or the CPU."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", n) for n in range(count)] or [torch.device("cpu")]


def _checked(device: torch.device, file: MeasuredRows, budget: float) -> DeviceCheck:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock, ratios, begun = HotClock(device), dict[Key, float](), time.monotonic()
    for workload in _few_of_each(workloads(device)):
        before = file.rows.get(workload.key)
        if before and (not ratios or time.monotonic() - begun < budget):
            op = workload.make()
            now = clock.launch_microseconds(op) if workload.host else clock.microseconds(op)
            ratios[workload.key] = now / before
            del op
    if not ratios:
        raise BadInput("CALIBRATION", "the file has no workload of this device", where=str(file.path),
                       found=file.about.get("device", ""), fix="a file of such a device")  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DeviceCheck(f"{device} {name}" if device.type == "cuda" else name, ratios)


def _few_of_each(every: Sequence[Workload]) -> list[Workload]:
    """The first workloads of each kind: those that steps use most. The host's launches differ by their host."""
    seen, found = dict[tuple[str | int, ...], int](), list[Workload]()
    for workload in every:
        kind = workload.key[:2] if workload.key[0] in ("product", "attention") else workload.key[:1]
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _EACH and not workload.host:
            found.append(workload)
    return found


def check_links(devices: Sequence[torch.device] | None = None) -> list[LinkCheck]:
    """Copies between all pairs of GPUs of this host, each way. Empty for one GPU."""
    devices = [d for d in devices or all_devices() if d.type == "cuda"]
    rates = dict[tuple[int, int], float]()
    for one, other in combinations(devices, 2):
        rates[one.index, other.index] = _copy_rate(one, other)
        rates[other.index, one.index] = _copy_rate(other, one)
    return judged(rates)


def judged(rates: Mapping[tuple[int, int], float]) -> list[LinkCheck]:
    """Which links are slower than the median one. `rates`: GB/s by (source, target)."""
    middle = statistics.median(rates.values()) if rates else 0.0
    return [LinkCheck(a, b, rate, middle > LINK_SLOWER * rate) for (a, b), rate in rates.items()]


def _copy_rate(source: torch.device, target: torch.device) -> float:
    x = torch.empty(_COPIED, dtype=torch.uint8, device=source)
    y = torch.empty(_COPIED, dtype=torch.uint8, device=target)
    found = list[float]()
    for _ in range(5):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        begun = time.perf_counter()
        y.copy_(x)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        found.append(_COPIED / (time.perf_counter() - begun) / 1e9)
    return statistics.median(found)

"""A minute's look at all devices of a host: which device or link is slower than its file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from penteract.errors import BadInput
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.links.link_workloads import PAIR, Hosts
from penteract.measure.calibrate.links.measure_links import LinkRows, sizes_of, start_ranks
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows
from penteract.measure.calibrate.measuring import device_here, rows_path, versions
from penteract.measure.calibrate.workloads import Workload, workloads

SLOWER = 1.05  # times as long as in the file: more than a hot device differs from itself
LINK_SLOWER = 1.1  # times as long as in the file, or as the median link
_EACH = 3  # workloads of a kind
_LONGEST = 60.0  # seconds for pairs of devices


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
    """GB/s of messages from one device to another. `ratio`: their time over that of the file; None where it has none.
    `of_median`: the median link's rate over this one's."""

    source: int
    target: int
    rate: float
    ratio: float | None
    of_median: float

    @property
    def slow(self) -> str:
        """Slower than what; empty if it is not."""
        if self.ratio is not None and self.ratio > LINK_SLOWER:
            return f"slower than its file, {self.ratio:.2f} times its time"
        return f"slower than the others, {self.of_median:.2f} times their time" if self.of_median > LINK_SLOWER else ""


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
            ratios[workload.key] = workload.microseconds(clock) / before
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


def check_links(file: Path, device: torch.device | None = None, ranks: int | None = None) -> list[LinkCheck]:
    """Messages between all pairs of GPUs of this host, each way, by ranks of their own. Where one seems slow, all are
    measured once more, and the faster time of each counts: a link that is slow is so twice. Empty for one GPU, and for
    a CPU: its processes have no link that could be slow. Raises LinksFailed if a rank fails."""
    device = device or device_here()
    ranks = ranks or (torch.cuda.device_count() if device.type == "cuda" else 1)
    if ranks < 2:
        return []
    before = dict(MeasuredRows.any_machine(rows_path(file)).under(PAIR))
    found = _pairs(device, ranks)
    if any(link.slow for link in judged(found, before)):
        again = _pairs(device, ranks)
        found = {pair: min(us, again.get(pair, us)) for pair, us in found.items()}
    return judged(found, before)


def _pairs(device: torch.device, ranks: int) -> dict[tuple[int, ...], float]:
    """Microseconds of a message, by (source, target, bytes)."""
    with TemporaryDirectory(prefix="penteract-") as folder:
        now = LinkRows(Path(folder) / "now.rows.jsonl", Hosts(1, ranks), device, sizes_of(device)[:1])
        if code := start_ranks(now, versions(device), _LONGEST, pairs_only=True):
            raise LinksFailed(code)
        return dict(MeasuredRows.any_machine(now.path).under(PAIR))


class LinksFailed(Exception):
    """A rank has failed, and its error is printed. `code`: the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def judged(now: Mapping[tuple[int, ...], float], before: Mapping[tuple[int, ...], float]) -> list[LinkCheck]:
    """Links beside the file and beside the median one. Both: microseconds by (source, target, bytes)."""
    middle = statistics.median(now.values()) if now else 0.0
    return [
        LinkCheck(a, b, size / us / 1e3, us / was if (was := before.get((a, b, size))) else None, us / middle)
        for (a, b, size), us in now.items()
    ]

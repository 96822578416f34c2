"""Start ranks that measure the links between the devices of this host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.device.device import device_of
from penteract.engine.runtime.launch import launch
from penteract.errors import BadInput, DiskFailure
from penteract.measure.calibrate.links.link_workloads import ON_CPU, ON_GPU, Hosts
from penteract.measure.calibrate.measured_rows import Key, MeasuredRows
from penteract.measure.calibrate.measuring import device_here, versions

LEAST = 5.0  # seconds: for less it is not worth to start ranks
_AGAIN = "penteract calibrate goes on with what is missing; --ranks 1 leaves links out"
_RANK = "penteract.measure.calibrate.links.link_rank"


def sizes_of(device: torch.device) -> tuple[int, ...]:
    """Bytes, the most used first."""
    return ON_GPU if device.type == "cuda" else ON_CPU


@dataclass(frozen=True, slots=True)
class LinkRows:
    """The rows of links between devices of a kind, in the file `path`. `launched`: a launcher such as torchrun has
    started the ranks, and this process is one. `rounds`: how often each is timed."""

    path: Path
    hosts: Hosts
    device: torch.device
    sizes: tuple[int, ...]
    launched: bool = False
    rounds: int = 5

    @staticmethod
    def of(path: Path, ranks: int | None, world: int | None = None) -> LinkRows:
        """`ranks`: None: one for each GPU of this host; on a CPU two, as two processes of it can train. `world`: of the
        ranks of a launcher, on however many hosts. Raises BadInput for more than there are."""
        device = device_here()
        if world is not None:
            if ranks not in (None, world):
                raise BadInput("USAGE", "a launcher has started the ranks", where="--ranks", found=ranks, allowed=world,
                               fix="leave it out")  # fmt: skip
            each = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
            return LinkRows(path, Hosts(world // each, each), device, sizes_of(device), launched=True)
        most = torch.cuda.device_count() if device.type == "cuda" else max(2, usable_here())
        usual = most if device.type == "cuda" else 2
        if ranks is not None and not 1 <= ranks <= most:
            raise BadInput("USAGE", "not a number of devices here", where="--ranks", found=ranks,
                           allowed=f"1 to {most}", fix=f"--ranks {usual}")  # fmt: skip
        return LinkRows(path, Hosts(1, ranks or usual), device, sizes_of(device))

    @property
    def ranks(self) -> int:
        """How many, on all hosts."""
        return self.hosts.count * self.hosts.each

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows; none of a single device."""
        every = (
            self.hosts.workloads(self.sizes, gpu=self.device.type == "cuda", direct=device_of(self.device).reads_peers)
            if self.ranks > 1
            else []
        )
        return [key for workload in every for key, _ in workload.rows]

    @property
    def folder(self) -> Path:
        """Where ranks leave their logs, and how they failed."""
        return self.path.with_name(self.path.name.removesuffix(".rows.jsonl") + ".ranks")

    def measure(self, seconds: float, say: Callable[[str], None]) -> int:
        """Measure what has no row yet, for about `seconds` once the ranks are there. Returns the exit code of the rank
        that failed first, whose error is printed; logs then stay beside the file. Ranks of a launcher raise theirs."""
        if self.ranks == 1:
            say("one device: there is no link to measure")
            return 0
        about = versions(self.device)
        if self.launched:
            rank = import_module(_RANK)  # here: it imports this module's neighbours, and torch.distributed
            work = rank.LinkWork(
                _made(self.folder), self.path, about, self.device.type, seconds, self.sizes, self.rounds
            )
            rank.joined(work)
            return 0
        there = MeasuredRows.of(self.path, about).rows
        if all(key in there for key in self.keys):
            return 0
        if seconds < LEAST:
            say(f"links are left out: they would have {seconds:.1f} s of the budget, and need {LEAST:.0f} s")
            return 0
        return start_ranks(self, about, seconds, pairs_only=False)


def start_ranks(links: LinkRows, about: Mapping[str, str], seconds: float, *, pairs_only: bool) -> int:
    """Start ranks on this host that measure all that has no row, or pairs of devices alone; returns the exit code.
    `about`: the machine, as the rows say it."""
    words = [f"--rows={links.path}", f"--about={json.dumps(about)}", f"--device={links.device.type}"]
    words += [f"--seconds={seconds}", f"--sizes={','.join(map(str, links.sizes))}"]
    words += [f"--rounds={links.rounds}", *["--pairs"] * pairs_only]
    folder = _made(links.folder)
    command = ["-m", _RANK, str(folder), *words]
    code = launch(links.ranks, command, folder, os.environ, _without_memory, again=_AGAIN)
    if not code:
        _remove(folder)
    return code


def _made(folder: Path) -> Path:
    """The folder; other ranks of a launcher may have made it. Raises DiskFailure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskFailure("DISK", f"cannot be made: {error.strerror}", where=str(folder)) from None
    return folder


def _remove(folder: Path) -> None:
    """What ranks left there; the folder too, if nothing else is in it."""
    shutil.rmtree(folder / "logs", ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in ("errors.jsonl", "status.json"):
            (folder / file).unlink(missing_ok=True)
        folder.rmdir()


def _without_memory(line: str) -> str:
    """The error of a rank that had no memory left: there is no layout to change."""
    return f"{line.partition(' · fix: ')[0]} · fix: stop other programs on these devices, then run it again"

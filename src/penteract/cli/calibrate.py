"""`penteract calibrate`: measure this machine, and write the hardware file that plans read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penteract.cli.resolve.world import launched
from penteract.cli.torch_modules import torch_module
from penteract.config.files.machine_file import HERE, kept_machine_file, machine_file
from penteract.config.hardware import cluster
from penteract.errors import BadInput, DiskFailure
from penteract.planner.report.trace import check_file
from penteract.units import printable

if TYPE_CHECKING:
    from penteract.measure.calibrate.measuring import CalibrationState

EXAMPLES = (
    "penteract calibrate",
    "penteract calibrate --budget 60 --out mine.toml",
    "penteract calibrate --ranks 4",
    "penteract plan llama-3.2-1b --gpus here",
    "penteract calibrate --check mine.toml",
)
_LONGEST = 86_400.0
_MEASURED, _CHECKED = 480.0, 45.0  # seconds
_LINKS = 0.4  # of the budget, at most


def calibrate(
    *,
    out: Annotated[
        Path | None,
        Parameter(
            help="The hardware file to write; the measurements are kept beside it, as .rows.jsonl. By default the file "
            "that --gpus here reads."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        Parameter(help="Seconds to measure, by default 480. What was measured before is not repeated."),
    ] = None,
    ranks: Annotated[
        int | None,
        Parameter(
            help="Devices between which links are measured: by default all GPUs of this host; two processes of a CPU. "
            "1 leaves links out."
        ),
    ] = None,
    check: Annotated[
        str | None,
        Parameter(
            help="A hardware file, or here: measure a minute, and say which devices are slower than it. Writes nothing."
        ),
    ] = None,
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> int:
    """Measure this machine under sustained load, and write a file for `plan --gpus FILE.toml`.

    Between all devices it measures each collective, over every group size, and messages, alone and beside products; on
    one device products of each dtype, the fused attention of each library that is installed, pointwise kernels, copies
    and launches: the most used first. Stopped or out of budget, the same command goes on. Links take up to 40 % of the
    budget. Without a GPU it measures the CPU.
    """
    seconds = budget if budget is not None else _CHECKED if check is not None else _MEASURED
    if not 0 < seconds <= _LONGEST:
        raise BadInput("USAGE", "not a budget", where="--budget", found=budget, allowed=f"0 to {_LONGEST:.0f} seconds")
    if check is not None:
        if out is not None:
            raise BadInput("USAGE", "a check writes no file", found="--out and --check", fix="leave one out")
        if ranks is not None:
            raise BadInput("USAGE", "a check looks at all devices", found="--ranks and --check", fix="leave one out")
        return _check(_file_to_check(check), seconds)
    if out is None:
        out = machine_file()
        _make_folder(out.parent)
    elif out.suffix != ".toml":
        raise BadInput("USAGE", "a hardware file is TOML", where="--out", found=printable(str(out)), allowed="*.toml")
    if not out.is_file() or not out.with_suffix(".rows.jsonl").is_file():
        check_file(out, "--out")
    begun, place = time.monotonic(), launched(os.environ)
    links = torch_module("measure.calibrate.links.measure_links", "measuring needs")
    measuring = torch_module("measure.calibrate.measuring", "measuring needs")
    between = links.LinkRows.of(measuring.rows_path(out), ranks, place.world if place else None)
    if code := between.measure(_LINKS * seconds, lambda line: print(line, file=sys.stderr, flush=True)):
        return code
    if place is not None and place.rank:
        return 0  # the first rank writes the file
    with _ProgressLine() as line:
        made: Any = measuring.calibrate(out, max(0.0, seconds - (time.monotonic() - begun)), line, links=between.keys)
    try:
        out.write_text(made.text, encoding="utf-8")
    except OSError as error:
        raise DiskFailure.of(error, out) from None
    skipped = f", {made.skipped} of which this device cannot run" if made.skipped else ""
    more = f"; {made.missing} are left: run it again to go on" if made.missing else ""
    print(f"{out}: {made.measured} workloads{skipped}{more}")
    return 0


def _make_folder(folder: Path) -> None:
    """Make the folder of the machine's file. Raises BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("FILE", f"cannot be made: {error.strerror}", where=printable(str(folder)),
                       fix="--out FILE.toml, or set XDG_CACHE_HOME") from None  # fmt: skip


def _file_to_check(name: str) -> Path:
    """The file that a check compares with. Raises BadInput for a name of the catalogue: its rows are not kept."""
    if name == HERE:
        return kept_machine_file()
    if not name.lower().endswith(".toml"):
        raise BadInput("USAGE", "a hardware file is TOML", where="--check", found=printable(name),
                       allowed=f"*.toml, or {HERE}", fix="penteract calibrate, then --check here")  # fmt: skip
    return Path(name)


def _check(file: Path, budget: float) -> int:
    """A line a device and a slow link; exit code 1 where one is slow."""
    cluster(str(file))  # what is no hardware file is refused by its line
    checking = torch_module("measure.calibrate.checking", "measuring needs")
    host, devices = os.uname().nodename, checking.check_devices(file, budget)
    for one in devices:
        key, worst = one.worst
        verdict = "slower than its file" if one.slow else "as its file"
        print(f"{host} {one.name}: {verdict}, {one.middle:.2f} times its time in the median of {len(one.ratios)}"
              f" workloads; {' '.join(map(str, key))} {worst:.2f} times")  # fmt: skip
    try:
        links = checking.check_links(file)
    except checking.LinksFailed as failed:
        return failed.code
    slow = [link for link in links if link.slow]
    for link in slow:
        print(f"{host} link {link.source} to {link.target}: {link.rate:.0f} GB/s, {link.slow}")
    if links and not slow:
        verdict = "as their file" if any(link.ratio is not None for link in links) else "their file has none"
        print(f"{host} links: {verdict}, {min(x.rate for x in links):.0f} to {max(x.rate for x in links):.0f} GB/s")
    return 1 if slow or any(one.slow for one in devices) else 0


class _ProgressLine:
    """The workload in progress and the time left: live on a terminal, else a line every tenth workload on stderr."""

    def __enter__(self) -> _ProgressLine:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
        self._shown = sys.stderr.isatty()
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *about: object) -> None:
        if self._shown:
            self._live.stop()

    def __call__(self, at: CalibrationState) -> None:
        """Show how far a calibration is."""
        text = f"{at.done}/{at.all} · {' '.join(map(str, at.key))} · {at.seconds:.0f} s, about {at.left:.0f} s left"
        if self._shown:
            from rich.text import Text

            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif at.done % 10 == 0:
            print(text, file=sys.stderr, flush=True)

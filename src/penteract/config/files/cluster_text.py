"""Counts in the name of a cluster, and what a name that is none was probably meant to be."""

from __future__ import annotations

from pathlib import Path

from penteract.config.files.hardware_schema import GPUS
from penteract.config.files.keys import show_key
from penteract.errors import BadInput

FILE = "no file of calibrate"
CALIBRATE = "--gpus 8xH200, or penteract calibrate --out FILE.toml"


def refuse_file(text: str, what: str, *, where: str, allowed: str, fix: str) -> None:
    """Raise BadInput where a file of this name is there: whoever names one does not mean a name of the catalog."""
    try:
        there = Path(text).is_file()
    except (OSError, ValueError):  # no path
        there = False
    if there:
        raise BadInput("FILE", f"it is {what}", where=where, found=show_key(text), allowed=allowed, fix=fix)


def in_cluster(bad: BadInput, text: str, name: str) -> BadInput:
    """The error about a device as one about a cluster, `text`, of devices that were called `name`."""
    near = bad.fix.removeprefix("use ")
    if near == bad.fix:
        return bad
    at = text.rindex(name)
    fix = f"--gpus {text[:at]}{near}{text[at + len(name) :]}"
    return BadInput(bad.code, bad.what, where="--gpus", found=bad.found, allowed=bad.allowed, fix=fix)


def count_of(digits: str, text: str) -> int:
    """A count in the name of a cluster. 0 is left to what knows the device, and can name a fix."""
    count = int(digits) if len(digits) < 10 else GPUS.most + 1
    if count > GPUS.most:
        allowed = f"{GPUS.least} to {GPUS.most} devices"
        raise BadInput("CLUSTER", "no cluster is that large", where="--gpus", found=text[:80], allowed=allowed)
    return int(count)


def nodes_of(gpus: int, usual: int) -> tuple[int, int]:
    """-> nodes, and devices of each. Only a single node may be partly filled."""
    if gpus <= usual:
        return 1, gpus
    check_whole(gpus, usual, "")
    return gpus // usual, usual


def check_whole(gpus: int, each: int, where: str) -> None:
    """Raise BadInput where nodes of `each` devices are not all full."""
    if gpus > each and gpus % each:
        raise BadInput("CLUSTER", "the last node would be part empty", where=where, found=f"{gpus} devices",
                       allowed=f"multiples of {each}",
                       fix=f"{gpus // each * each} or {-(-gpus // each) * each}")  # fmt: skip

"""The disk for runs: free space, speed, and whether it can be written."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.engine.doctor.finding import Finding
from penteract.engine.doctor.machine import Disk, HostReport
from penteract.units import GIB, show_bytes, show_count

AREA = "disk"
LEAST_FREE = 10 * GIB
LEAST_FILES = 1000
SLOW = 100e6  # bytes a second: a checkpoint of 1B parameters would take two minutes
STATE_BYTES = 12  # for each parameter in a checkpoint: master weight and both moments of AdamW in fp32
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.s3fs", "cifs", "smb3", "9p", "virtiofs")
ELSEWHERE = "--output.folder=FOLDER on another disk"


def findings(machine: HostReport) -> Iterator[Finding]:
    """Whether the run folder can be written, and how fast."""
    disk = machine.disk
    if disk.error:
        yield Finding(AREA, f"{disk.asked} cannot be written: {disk.error}", "bad", _remedy(disk))
    yield _room(disk)
    if disk.files is not None and disk.files < LEAST_FILES:
        yield Finding(AREA, f"{disk.files} more files can be made in {disk.asked}", "bad", ELSEWHERE)
    if disk.speed is not None:
        what = f"written and flushed at {disk.speed / 1e9:.2f} GB/s"
        if disk.speed < SLOW:
            yield Finding(AREA, f"{what}: training will wait for checkpoints", "warn", ELSEWHERE)
        else:
            yield Finding(AREA, what)
    if disk.kind in SHARED:
        yield Finding(AREA, f"{disk.asked} is on {disk.kind}: its speed changes with what others do", "note")


def _room(disk: Disk) -> Finding:
    if disk.free is None:
        return Finding(AREA, f"not known: how much room {disk.asked} has", "note")
    what = f"{show_bytes(disk.free)} free for {disk.folder}"
    if disk.kind:
        what += f" ({disk.kind})"
    room = show_count(disk.free / STATE_BYTES)
    if disk.free < GIB:
        return Finding(AREA, f"{what}: the disk is full", "bad", f"make room, or {ELSEWHERE}")
    what += f": one checkpoint of {room} parameters"
    if disk.free < LEAST_FREE:
        return Finding(AREA, what, "warn", f"make room, or {ELSEWHERE}")
    return Finding(AREA, what)


def _remedy(disk: Disk) -> str:
    full = disk.free is not None and disk.free < GIB
    return f"make room, or {ELSEWHERE}" if full else f"chmod u+w {disk.asked}, or {ELSEWHERE}"

"""Who may write to a run's folder: one process at a time, by epochs.

`epochs/000003.json` says who took the run in its third epoch. It is created exclusively, so of two processes that start
at once, one gets it. The holder counts in `000003.beat` every few seconds, and creates `000003.ended` when it ends.
Whoever comes while an epoch is not ended:

* On the holder's host, its process tells whether it lives: the pid, the time at which it started, the boot and the pid
  namespace.
* Elsewhere, clocks may differ and a file system may lag: the holder lives if its count changes within `PATIENCE_S`.

A holder that was taken for dead can still write, so nothing relies on its death: the next epoch takes away the folder
in which it would save (`checkpoint.take`), and readers of `metrics.jsonl` prefer rows of later epochs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from penteract.engine.run_folder.exclusive import create_exclusively
from penteract.errors import BadInput, DiskFailure

PATIENCE_S = 180.0  # without a beat, by the observer's own clock
BEAT_S = 5.0
FOLDER = "epochs"
_NAME = re.compile(r"([0-9]{6,})\.json")


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that took an epoch: its host, the boot and the pid namespace in which `pid` counts, and when it
    started, in clock ticks since that boot."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    since: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @staticmethod
    def here() -> Holder:
        """This process."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return Holder(socket.gethostname(), _boot(), _namespace(), os.getpid(), _started(os.getpid()), since)

    @property
    def visible(self) -> bool:
        """Whether its pid means the same here."""
        return bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace())

    @property
    def alive(self) -> bool:
        """Whether it still runs, if it is `visible`."""
        return bool(self.started) and _started(self.pid) == self.started


@dataclass(slots=True)
class Lease:
    """The right to write to a run's folder, while this process lives and no later epoch begins.

    `ousted` is called, in a thread, once a later epoch has begun.
    """

    folder: Path
    epoch: int
    ousted: Callable[[], None] = lambda: None
    _over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> Lease:
        """Beat in a thread from now on."""
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        return self

    def end(self) -> None:
        """Give the run back. Never raises."""
        self._over.set()
        with contextlib.suppress(OSError):
            _path(self.folder, self.epoch, "ended").touch()

    def _beat(self) -> None:
        count = 0
        while True:
            with contextlib.suppress(OSError):
                if _newest(self.folder) > self.epoch:
                    return self.ousted()
                fresh = _path(self.folder, self.epoch, "beat.tmp")
                fresh.write_text(f"{count}\n")
                fresh.replace(_path(self.folder, self.epoch, "beat"))
            count += 1
            if self._over.wait(BEAT_S):
                return None


def take(folder: Path, *, notify: Callable[[str], None] = lambda line: None, patience: float = PATIENCE_S) -> Lease:
    """Take a run for this process. `notify` gets a line if that needs patience.

    Raises BadInput if another process has it; DiskFailure.
    """
    try:
        (folder / FOLDER).mkdir(exist_ok=True)
        last = _newest(folder)
        if last:
            refuse_held(folder, notify=notify, patience=patience)
        create_exclusively(_path(folder, last + 1, "json"), json.dumps(asdict(Holder.here())) + "\n")
    except FileExistsError as e:
        raise _held(folder, "another process, just now") from e
    except OSError as e:
        raise DiskFailure("DISK", "could not take the run for this process", where=str(e.filename or folder),
                          found=e.strerror, fix="check the folder's permissions and space") from e  # fmt: skip
    return Lease(folder, last + 1)


def refuse_held(
    folder: Path, *, notify: Callable[[str], None] = lambda line: None, patience: float = PATIENCE_S
) -> None:
    """Raise BadInput if a process that lives has the run; wait up to `patience` seconds where only its beats tell."""
    epoch = _newest(folder)
    if not epoch or _path(folder, epoch, "ended").exists():
        return
    holder = _holder(folder, epoch)
    if holder is not None and holder.visible:
        if holder.alive:
            raise _held(folder, str(holder))
        return
    name = str(holder or "a process that has not said who it is")
    notify(f"{folder} is held by {name}: waiting up to {patience:.0f} s for a sign of life")
    first, start = _count(folder, epoch), time.monotonic()
    while time.monotonic() - start < patience:
        if _path(folder, epoch, "ended").exists():
            return
        if _count(folder, epoch) != first:
            raise _held(folder, name)
        time.sleep(min(1.0, patience / 10))


def _held(folder: Path, by: str) -> BadInput:
    return BadInput("HELD", "another process trains this run", where=str(folder), found=by,
                    fix="let it end, or stop it, and resume then")  # fmt: skip


def _epochs(folder: Path) -> Iterator[int]:
    for path in (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ():
        if name := _NAME.fullmatch(path.name):
            yield int(name[1])


def _newest(folder: Path) -> int:
    """The last epoch that was taken; 0: none."""
    return max(_epochs(folder), default=0)


def _path(folder: Path, epoch: int, kind: str) -> Path:
    return folder / FOLDER / f"{epoch:06d}.{kind}"


def _holder(folder: Path, epoch: int) -> Holder | None:
    """Who took an epoch; None if it is not written, or cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads(_path(folder, epoch, "json").read_text()))
    return None


def _count(folder: Path, epoch: int) -> str:
    with contextlib.suppress(OSError):
        return _path(folder, epoch, "beat").read_text()
    return ""


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if there is none, or it is only waited for by its parent.
    The name in the second field may hold spaces and brackets."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    return ""

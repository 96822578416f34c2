"""The checkpoints of one run, as a rank uses them: load the newest that all ranks can read, save, remove old ones."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice, manifest
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.engine.rank.rank import Rank
from penteract.engine.run_folder import checkpoint_folder
from penteract.errors import BadInput, Bug, CorruptData, DiskFailure, PenteractError
from penteract.units import show_bytes

log = logging.getLogger("penteract")


@dataclass(slots=True)
class Checkpoints:
    """Saves and loads in `folder`. All methods are called by every rank.

    keep     how many steps stay, besides the newest proven one; 0: all
    epoch    the run's epoch; this rank's process belongs to it
    last     the step that was saved or loaded last; 0: none
    threads  of this rank, to copy, hash and write
    """

    folder: Path
    rank: Rank
    keep: int
    epoch: int = 0
    last: int = 0
    threads: int = 1
    _written: ReadBack | None = field(default=None, repr=False)  # what was saved last
    _loaded: Path | None = None  # what was loaded, until it is proven

    def begin(self) -> None:
        """Take the folder for this epoch. Raises BadInput on all ranks if one does not see it, or sees another's."""
        error = None
        try:
            checkpoint_folder.find(self.folder.parent, write=True)
        except BadInput as e:
            error = e
        if (error := self.rank.one_of(error)) is not None:
            raise error
        if self.rank.number == 0:
            with checkpoint.failing(self.folder, "take the folder of checkpoints"):
                checkpoint.take(self.folder, self.epoch)

    def check_room(self, size: int, saves: int) -> None:
        """Raise DiskFailure on rank 0 unless the disk has room for the checkpoints to come: `saves` of `size` bytes, of
        which old ones are removed."""
        if self.rank.number or not saves:
            return
        held = len(checkpoint.committed(self.folder))
        # Before old ones go, there are those that are kept, a proven one, and the new one.
        copies = min(saves, max(1, self.keep + 2 - held)) if self.keep else saves
        room, files = checkpoint.room(self.folder), copies * (checkpoint.most_files(size, self.rank.world) + 4)
        if copies * size > room.bytes:
            raise DiskFailure("DISK", f"no room for the checkpoints to come: {copies} of {show_bytes(size)}",
                              where=str(self.folder), found=f"{show_bytes(room.bytes)} free",
                              allowed=f">= {show_bytes(copies * size)}",
                              fix="another --checkpoint.folder, a smaller --checkpoint.keep, or a larger "
                              "--checkpoint.every")  # fmt: skip
        if room.files is not None and files > room.files:
            raise DiskFailure("DISK", "no room for the files of the checkpoints to come", where=str(self.folder),
                              found=f"{room.files} inodes free", allowed=f">= {files}",
                              fix="another --checkpoint.folder, or remove files there")  # fmt: skip

    def load(self, load: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Load the newest checkpoint that every rank can read. Newer ones, which are damaged, are set aside.

        `load(at)` fills this rank's state and returns the checkpoint's `extra`; it raises CorruptData. Rank 0 chooses;
        all ranks go one step back together.
        """
        found = ""
        for at in self._candidates():
            extra, error = dict[str, Any](), None
            try:
                extra = load(at)
            except CorruptData as e:
                error = e
            if (worst := self.rank.one_of(error)) is None:
                self._go_on_from(at)
                self.last = int(extra["step"])
                return extra
            found = found or f"{at.name}: {worst.found or worst.what}"
            if self.rank.number == 0:
                log.warning("%s is damaged, trying the one before: %s", at.name, worst.found or worst.what)
        raise CorruptData("CHECKPOINT", "no checkpoint can be read", where=str(self.folder), found=found,
                          fix="start a new run")  # fmt: skip

    def save(self, step: int, slices: Iterable[Slice], extra: dict[str, Any], *, prune: bool = True) -> None:
        """Commit a checkpoint; then remove old ones, unless the run is ending with an error (`prune` False). Values
        that are not finite are refused: BadNumerics. Raises DiskFailure."""
        tables = list[RankTable]()
        at = checkpoint.save(
            self.folder, step, slices, extra, rank=self.rank.number, world=self.rank.world, barrier=self.rank.barrier,
            epoch=self.epoch, finite=True, threads=self.threads, written=tables.append,
        )  # fmt: skip
        self.last = step
        if prune:
            self._prove()
            if self.rank.number == 0:
                with checkpoint.failing(self.folder, "remove older checkpoints"):
                    checkpoint.prune(self.folder, self.keep, self.epoch)
            self._written = ReadBack(at, tables[0], whole=self.rank.number == 0)

    @property
    def before(self) -> Before | None:
        """The checkpoint that is proven when a later one is committed: finite steps have been trained since."""
        if self._written is not None:
            return Before(self._written.at, self._written)
        return None if self._loaded is None else Before(self._loaded, None)

    def commit_seen(self, read_back: ReadBack) -> None:
        """A save in the background has been committed and is being read back; the one before is not waited for any
        more."""
        self._written, self._loaded = read_back, None

    def close(self) -> None:
        """Stop reading back what was saved last."""
        if self._written is not None:
            self._written.stop()

    def end_epoch(self) -> None:
        """After the last save, when nothing writes there any more: leave the folder without one for unfinished
        saves."""
        if self.rank.number == 0:
            checkpoint.end_epoch(self.folder, self.epoch)

    def _prove(self) -> None:
        """The steps since the last save or load were finite, so what it wrote or read is proven if it was read back."""
        at, error = self._loaded, None
        if self._written is not None:
            at, error = self._written.at, self._written.result()
        if at is None:
            return
        error = self.rank.one_of(error)
        if self.rank.number == 0:
            if error is None:
                with checkpoint.failing(at, "mark a checkpoint as proven"):
                    checkpoint.prove(at)
            else:
                log.warning("%s is not on the disk as it was written: %s", at.name, error)
        self._loaded = None

    def _candidates(self) -> list[Path]:
        """The intact checkpoints that rank 0 sees, the newest first."""
        names, error = "", None
        if self.rank.number == 0:
            try:
                names = "\n".join(at.name for at in checkpoint.intact(self.folder))
            except BadInput as e:
                error = e
        if (error := self.rank.one_of(error)) is not None:
            raise error
        return [self.folder / name for name in self.rank.broadcast(names).split("\n")]

    def _go_on_from(self, at: Path) -> None:
        """Rank 0 sets newer checkpoints aside, before anything is trained."""
        self._loaded = at
        if self.rank.number == 0:
            with checkpoint.failing(self.folder, "set newer checkpoints aside"):
                names = checkpoint.set_aside(self.folder, at, self.epoch)
            if names:
                log.warning("set aside in %s/aside-%06d: %s", self.folder, self.epoch, ", ".join(names))
        self.rank.barrier()


class Before(NamedTuple):
    """A checkpoint to be proven. `read_back`: None if this rank has loaded it."""

    at: Path
    read_back: ReadBack | None


class ReadBack:
    """Reads a rank's files of a checkpoint from the disk, and compares them with the digests of what it wrote, while
    training goes on: so no rank needs the rectangles of others. `whole`: it reads the manifest too, one tensor at a
    time, as one rank does for all; what takes long there lets training run."""

    def __init__(self, at: Path, table: RankTable, *, whole: bool) -> None:
        """Begin to read."""
        self.at, self.table, self.whole = at, table, whole
        self._error: PenteractError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-back", daemon=True)
        self._thread.start()

    def result(self) -> PenteractError | None:
        """Wait until it is read; what is wrong with it, or None."""
        self._thread.join()
        return self._error

    @property
    def is_reading(self) -> bool:
        """Whether it is not read yet."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the present tensor."""
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            if self.whole:
                for name in (manifest.MANIFEST, manifest.RECTANGLES):
                    _drop_from_cache(self.at / name)
                manifest.check(self.at)
            checkpoint.verify_share(self.at, self.table, prepare=_drop_from_cache, stop=self._stopped.is_set)
        except PenteractError as e:
            self._error = e
        except OSError as e:
            self._error = DiskFailure("DISK", "could not read a checkpoint back", where=str(self.at), found=e.strerror)
        except Exception as e:  # of whatever kind: nothing was compared, so nothing is proven
            found = f"{type(e).__name__}: {e}"
            self._error = Bug("CHECKPOINT", "a checkpoint could not be read back", where=str(self.at), found=found)


def _drop_from_cache(path: Path) -> None:
    """Ask the system to forget a file's pages, so that it is read from the disk."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

"""Blocks of a stream that one process of a host tokenises for all.

Each process reads blocks from a folder of the host. The one that holds the folder's lock has a thread that makes and
stores them, as far ahead of the process that is furthest on as it may be. So it never waits for its own training, and
whoever waits for a block waits for no other rank. A process that finds a block gone makes it itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import NamedTuple

import numpy as np

from penteract.engine.data.stream.read_ahead import STOP_S
from penteract.engine.data.stream.stream_blocks import BLOCK, BlockStart, ReadBlocks, StreamBlock, digest_of
from penteract.engine.data.tokenizer import id_type
from penteract.errors import CorruptData
from penteract.units import MIB

log = logging.getLogger(__name__)

MOST = 4096 * MIB  # of blocks that lie in a folder
_POLL_S = 0.01
_UNUSED_S = 600.0  # after which a folder without a holder is one of a run that was killed
_LOCK = "lock"
_BLOCK = "block-"  # then its number
_WANT = "want-"  # then the process: the number of the block that it wants
_LARGEST_HEAD = 2**20


class SharedFolder(NamedTuple):
    """A folder that a run's processes of a host share, in a start of its own; so many of them read from it."""

    path: Path
    readers: int

    def make(self) -> None:
        """Make it, and remove those that killed runs have left beside it. Nothing is shared where it cannot be made."""
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for other in self.path.parent.iterdir():
                if other != self.path and _is_abandoned(other):
                    shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove it at the end of a run. A process that still reads makes blocks itself."""
        gone = self.path.with_name(f"{self.path.name}-{os.getpid()}")
        with suppress(OSError):
            self.path.rename(gone)  # so that nobody puts anything into it meanwhile
        shutil.rmtree(gone, ignore_errors=True)


@dataclass(slots=True)
class SharedBlocks:
    """The blocks of one stream. `make(start, stopped)` gives those that this process tokenises; so many blocks are made
    `ahead` of what anybody wants."""

    folder: SharedFolder
    make: ReadBlocks
    sequence_length: int
    vocab_size: int
    ahead: int

    def read(self, start: BlockStart, stopped: Callable[[], bool]) -> Iterator[StreamBlock]:
        """The blocks from `start` on, made here or elsewhere, until `stopped`. Raises what `make` does."""
        try:
            want = _Want(self.folder.path)
        except OSError:  # no such folder
            yield from self.make(start, stopped)
            return
        own: Iterator[StreamBlock] | None = None
        with closing(want), closing(_Maker(self)) as maker:
            while not stopped():
                is_seen = want.put(start.number)
                is_new = start.number > max(_numbers(self.folder.path), default=-1)
                if (block := self.stored(start)) is not None:
                    own = None
                elif own is None and is_new and is_seen and maker.is_anywhere(start):
                    time.sleep(_POLL_S)
                    continue
                else:  # it is gone, or cannot be shared
                    own = own or self.make(start, stopped)
                    if (block := next(own, None)) is None:
                        return
                yield block
                start = block.ends

    def store(self, block: StreamBlock, before: str) -> None:
        """Store a block whose predecessors have the digest `before`. Raises OSError."""
        head = {"before": before, "dtype": block.ids.dtype.name, "ends": block.ends.as_json()}
        new = self.folder.path / f"new-{os.getpid()}-{get_ident()}"
        try:
            with new.open("wb") as file:
                file.write(json.dumps(head).encode() + b"\n")
                file.write(block.ids.data)
            new.replace(self._at(block.number))
        finally:
            new.unlink(missing_ok=True)

    def stored(self, start: BlockStart) -> StreamBlock | None:
        """The block that begins there, if it is stored whole. Its tokens are mapped: all processes have them once."""
        try:
            with self._at(start.number).open("rb") as file:
                line = file.readline(_LARGEST_HEAD)
                head = json.loads(line)
                ends, dtype = BlockStart.parse(head["ends"]), id_type(self.vocab_size)
                if (head["before"], head["dtype"]) != (start.digest, dtype.name) or ends.number != start.number + 1:
                    return None
                ids = np.memmap(file, dtype, "r", len(line), (BLOCK * self.sequence_length + 1,))
            whole = digest_of(start.digest, ids, self.sequence_length) == ends.digest
            return StreamBlock(start.number, ids, ends) if whole else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CorruptData):
            return None

    def remove_read(self) -> None:
        """Remove the blocks that every process has read, and the oldest of too many: a process may read another
        folder of this name, in a container of its own."""
        wanted, numbers = _wanted(self.folder.path), sorted(_numbers(self.folder.path))
        read = min(wanted) if len(wanted) >= self.folder.readers else 0
        size = BLOCK * self.sequence_length * id_type(self.vocab_size).itemsize
        most = max(MOST // size, self.ahead + 2)
        for number in numbers:
            if number < read or number <= numbers[-1] - most:
                with suppress(OSError):
                    self._at(number).unlink()

    def _at(self, number: int) -> Path:
        return self.folder.path / f"{_BLOCK}{number}"


class _Maker:
    """A thread that makes blocks and stores them, once its process has the lock."""

    def __init__(self, shared: SharedBlocks) -> None:
        self._shared, self._stop, self._gave_up = shared, Event(), False
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def is_anywhere(self, start: BlockStart) -> bool:
        """Whether some process makes the blocks from `start` on; if none did, this one does now. False where blocks
        cannot be stored. Raises what making them raised here."""
        if self._error is not None:
            raise self._error
        if self._thread is None and not self._gave_up:
            try:
                lock = _hold(self._shared.folder.path)
            except OSError:
                return False
            if lock is not None:
                thread = Thread(target=self._run, args=[lock, start], name="make-blocks", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads
                    _let_go(lock)
                    return False
                self._thread = thread
        return not self._gave_up

    def close(self) -> None:
        """Stop after the present batch of documents, and wait for that unless it takes long."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self, lock: int, start: BlockStart) -> None:
        error: BaseException | None = None
        try:
            self._make(lock, start)
        except BaseException as e:  # whoever reads raises it
            error = e
        finally:
            _let_go(lock)
        self._error = error

    def _make(self, lock: int, start: BlockStart) -> None:
        shared, before = self._shared, start.digest
        for block in shared.make(start, self._stop.is_set):
            if self._stop.is_set():
                return
            try:
                shared.store(block, before)
                os.utime(lock)  # what is old in a temporary folder may be removed
            except OSError as e:  # a full disk costs time, nothing else
                self._gave_up = True
                if e.errno != errno.ENOENT:  # another has ended and removed the folder
                    log.warning("each process of this host tokenises the stream itself: %s", e.strerror)
                return
            before, newest = block.ends.digest, block.number
            del block  # it may be large
            while not self._stop.is_set() and newest >= max(_wanted(shared.folder.path), default=0) + shared.ahead:
                time.sleep(_POLL_S)
            shared.remove_read()


class _Want:
    """The file in which a process says which block it wants next."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{_WANT}{os.getpid()}-{id(self)}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)

    def put(self, number: int) -> bool:
        """Whether it is seen: the folder may be gone or full, and nobody would know what to make."""
        try:  # as many bytes each time: who reads them sees one number or the other
            return os.pwrite(self._file, b"%020d" % number, 0) == 20 and os.fstat(self._file).st_nlink > 0
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)


def _wanted(folder: Path) -> list[int]:
    """The numbers of the blocks that processes want."""
    found = list[int]()
    for name in _files(folder, _WANT):
        with suppress(OSError):
            text = (folder / name).read_bytes()
            found.append(int(text) if text.isdigit() else 0)
    return found


def _numbers(folder: Path) -> list[int]:
    """The numbers of the blocks that are stored."""
    names = [name.removeprefix(_BLOCK) for name in _files(folder, _BLOCK)]
    return [int(name) for name in names if name.isdecimal()]


def _files(folder: Path, prefix: str) -> list[str]:
    """The names that begin so; none in a folder that is gone."""
    with suppress(OSError):
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    return []


def _hold(folder: Path) -> int | None:
    """The open file of the lock; None if another process has it. Raises OSError where there can be none."""
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(file)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file


def _let_go(lock: int) -> None:
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked may have it open, too
    os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    try:
        at = folder / _LOCK
        if time.time() - (at if at.exists() else folder).stat().st_mtime < _UNUSED_S or (lock := _hold(folder)) is None:
            return False
    except OSError:
        return False
    _let_go(lock)
    return True

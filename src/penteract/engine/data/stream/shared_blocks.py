"""Blocks of a stream that one process of a host tokenises for all.

The process that holds the lock of a folder makes blocks and stores them there; the others read them. A block says what
was before it, so one of other data is not taken. Nothing depends on another process but speed: whoever waits for a
block while none is being made makes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penteract.config.files.regular import read_regular
from penteract.engine.data.stream.stream_blocks import BLOCK, BlockStart, ReadBlocks, StreamBlock, digest_of
from penteract.engine.data.tokenizer import id_type
from penteract.errors import CorruptData

BEAT_S = 2.0  # a process that tokenises nothing for so long is not waited for
_POLL_S = 0.01
_LARGEST = 2**32  # bytes of a block
_PREFIX = "block-"  # then its number


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The blocks of one stream. `make(start, stopped)` gives those that this process tokenises; it asks `stopped` for
    each batch of documents. `kept`: so many are left behind the newest."""

    folder: Path
    make: ReadBlocks
    sequence_length: int
    vocab_size: int
    kept: int

    def read(self, start: BlockStart, stopped: Callable[[], bool]) -> Iterator[StreamBlock]:
        """The blocks from `start` on, made here or elsewhere, until `stopped`. Raises what `make` does."""
        own: Iterator[StreamBlock] | None = None
        asked = time.monotonic()
        while not stopped():
            numbers = self._numbers()
            if (block := self._stored(start)) is not None:
                own = None
            elif (lock := self._hold()) is not None:
                yield from self._make_all(lock, start, stopped)
                return
            elif own is None and start.number > max(numbers, default=-1) and self._is_coming(asked):
                time.sleep(_POLL_S)
                continue
            else:  # a process that is slower would be waited for at each block
                own = own or self.make(start, stopped)
                if (block := next(own, None)) is None:
                    return
            yield block
            start, asked = block.ends, time.monotonic()

    def _make_all(self, lock: int, start: BlockStart, stopped: Callable[[], bool]) -> Iterator[StreamBlock]:
        """Make blocks for all, for as long as they can be stored."""

        def beat() -> bool:
            with suppress(OSError):
                os.utime(lock)
            return stopped()

        try:
            for block in self.make(start, beat):
                self._store(block, start.digest)
                self._remove(lambda number, newest=block.number: number < newest - self.kept)
                yield block
                start = block.ends
        finally:
            self._remove(lambda _: True)
            os.close(lock)

    def _hold(self) -> int | None:
        """The open file of the lock; None if another process has it."""
        file = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(file)
        except OSError:
            if file is not None:
                os.close(file)
            return None
        return file

    def _is_coming(self, asked: float) -> bool:
        """Whether the process that has the lock is at work, or had no room for another block until now."""
        if time.monotonic() - asked < BEAT_S:
            return True
        with suppress(OSError):
            return abs(time.time() - self._lock.stat().st_mtime) < BEAT_S
        return False

    def _store(self, block: StreamBlock, before: str) -> None:
        """A block whose predecessors have the digest `before`. A full disk costs the others time, nothing else."""
        about = {"before": before, "dtype": block.ids.dtype.name, "ends": block.ends.as_json()}
        new = self.folder / f"new-{os.getpid()}"
        with suppress(OSError):
            try:
                with new.open("wb") as file:
                    file.write(json.dumps(about).encode() + b"\n")
                    file.write(block.ids.tobytes())
                new.replace(self._at(block.number))
            finally:
                new.unlink(missing_ok=True)

    def _stored(self, start: BlockStart) -> StreamBlock | None:
        """The block that begins there, if it was stored whole."""
        try:
            raw = read_regular(self._at(start.number), largest=_LARGEST)
            end = raw.index(b"\n")
            about = json.loads(raw[:end])
            ends = BlockStart.parse(about["ends"])
            ids = np.frombuffer(raw, id_type(self.vocab_size), offset=end + 1)
            fits = (about["before"], about["dtype"], ends.number) == (start.digest, ids.dtype.name, start.number + 1)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CorruptData):
            return None
        if not fits or len(ids) != BLOCK * self.sequence_length + 1:
            return None
        whole = digest_of(start.digest, ids, self.sequence_length) == ends.digest
        return StreamBlock(start.number, ids, ends) if whole else None

    def _remove(self, chosen: Callable[[int], bool]) -> None:
        for number in filter(chosen, self._numbers()):
            with suppress(OSError):
                self._at(number).unlink()

    def _numbers(self) -> list[int]:
        """Of the blocks that are stored."""
        with suppress(OSError):
            names = [path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*")]
            return [int(name) for name in names if name.isdecimal()]
        return []

    @property
    def _lock(self) -> Path:
        return self.folder / "lock"

    def _at(self, number: int) -> Path:
        return self.folder / f"{_PREFIX}{number}"

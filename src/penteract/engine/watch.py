"""Errors cross ranks: the first that fails says so, every other hears of it within seconds and leaves.

A thread on each rank keeps its own connection to the store: the main thread may be blocked in a collective.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine.rank import Rank
from penteract.errors import Bug, OutOfMemory, PeerLost, PenteractError, Preempted

POLL_S = 0.5
LOST_S = 30.0  # without a sign of life

_ABORT = "penteract/abort"


@dataclass(slots=True)
class Watcher:
    """Listens for another rank's failure, and for silence."""

    rank: Rank
    folder: Path
    lost_s: float = LOST_S
    done: threading.Event = field(default_factory=threading.Event)
    store: Any = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        if self.rank.store is None:
            return
        self.store = _own_line(self.rank)
        self.thread = threading.Thread(target=self._listen, name="watcher", daemon=True)
        self.thread.start()

    def report(self, error: PenteractError, text: str) -> None:
        """Write the error down and tell the others."""
        row = error.as_dict() | {
            "rank": self.rank.number, "host": socket.gethostname(), "time": time.time(), "line": str(error), "traceback": text,
        }  # fmt: skip
        with (self.folder / "errors.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
        if self.store is not None and not isinstance(error, PeerLost):
            self.store.set(_ABORT, json.dumps({"rank": self.rank.number, "line": str(error)}))

    def stop(self) -> None:
        """This rank is well and leaves."""
        self.done.set()
        if self.store is not None:
            self.store.set(_life(self.rank.number), "left")
        if self.thread is not None:
            self.thread.join(5)

    def _listen(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        beat = 0
        while not self.done.wait(POLL_S):
            beat += 1
            try:
                self.store.set(_life(self.rank.number), str(beat))
                if self.store.check([_ABORT]):
                    self._leave(json.loads(self.store.get(_ABORT)))
                if (silent := self._silent(seen)) is not None:
                    self._leave({"rank": silent, "line": f"no sign of life for {self.lost_s:.0f} s"})
            except dist.DistError as e:
                if not self.done.is_set():
                    self._leave({"rank": 0, "line": f"the store is gone: {type(e).__name__}"})

    def _silent(self, seen: dict[int, tuple[str, float]]) -> int | None:
        now = time.monotonic()
        for r in range(self.rank.world):
            if r == self.rank.number or not self.store.check([_life(r)]):
                continue
            life = self.store.get(_life(r)).decode()
            if life != seen.get(r, ("", 0.0))[0]:
                seen[r] = (life, now)
            elif life != "left" and now - seen[r][1] > self.lost_s:
                return r
        return None

    def _leave(self, told: dict[str, Any]) -> None:
        """The main thread may be in a collective that will never end: leave without it."""
        if self.done.is_set():
            return
        error = PeerLost("PEER", f"rank {told['rank']} failed: {told['line']}", where=f"rank {self.rank.number}",
                         fix=f"see {self.folder / 'errors.jsonl'}")  # fmt: skip
        self.report(error, "")
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def _life(rank: int) -> str:
    return f"penteract/life/{rank}"


def _own_line(rank: Rank) -> Any:
    """A connection of the watcher's own: the default store's may be held by the main thread."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))


@contextmanager
def watched(rank: Rank, folder: Path) -> Iterator[None]:
    """Run a rank's work: its failure is told to the others, theirs ends it."""
    watcher = Watcher(rank, folder)
    watcher.start()
    try:
        yield
    except BaseException as e:
        error = typed(e)
        watcher.done.set()
        if not isinstance(error, Preempted):
            watcher.report(error, traceback.format_exc())
        raise error from e
    watcher.stop()


def typed(e: BaseException) -> PenteractError:
    """Any failure as one of ours."""
    if isinstance(e, PenteractError):
        return e
    if isinstance(e, torch.OutOfMemoryError | MemoryError):
        fix = "a smaller micro-batch, more recompute, or more ranks"
        return OutOfMemory("MEMORY", " ".join(str(e).split())[:200], fix=fix)
    return Bug(
        "BUG", f"{type(e).__name__}: {' '.join(str(e).split())[:200]}", fix="run again with --debug, and report it"
    )

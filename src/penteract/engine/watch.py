"""Errors cross ranks: who fails says so in the store, and a thread on every rank looks there and leaves.

Each rank beats in the store twice a second, and looks for an abort key and at the beat of the next rank that is still at
work: a ring, so the store's load grows with the ranks and not with their square. Whoever leaves ends its process
outright, as a rank whose main thread is blocked in gloo can be ended in no other way, and tearing down groups whose
members are gone can take minutes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from penteract.engine import rundir
from penteract.engine.failures import from_exception, is_of_a_peer, record
from penteract.errors import PeerLost, PenteractError, Preempted

ABORT = "abort"
GRACE = 1.0  # seconds that a rank's own error gets before another's ends it
BLAME = 3.0  # seconds to find out whose fault a broken connection is
TEARDOWN = 3.0  # seconds that groups get to be torn down
PARTING = 10.0  # seconds that rank 0 waits for others when all stop together


class Watcher:
    """One rank's watch over the others, from `start` to `finish` or `end`.

    `abort` is called before this process ends because of another rank; it may block.
    `timeout`: seconds without a beat after which a rank counts as lost.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, run_dir: Path, abort: Callable[[], None],
        *, interval: float = 0.5, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        # A connection of its own: the main thread's may be held by a blocking wait.
        self.store = dist.PrefixStore("watch", store.clone())
        self.store.set_timeout(timedelta(seconds=timeout))
        self.rank, self.world, self.run_dir, self.abort = rank, world, run_dir, abort
        self.interval, self.timeout = interval, timeout
        self.row: dict[str, Any] | None = None  # of the rank that failed first
        self._turns = 0
        self._silence = 0.0  # of the rank that is watched, in seconds of this thread's own turns
        self._seen: tuple[int, bytes] = (rank, b"")
        self._over = threading.Event()
        self._leaving = threading.Lock()  # held by the one thread that ends this process

    def start(self) -> None:
        for work in (self._look, self._guard):
            threading.Thread(target=work, name=f"watch{work.__name__}", daemon=True).start()

    # ---- leaving, by the main thread -------------------------------------------------------------------------

    def finish(self, limit: float | None = None) -> None:
        """All went well here. Rank 0, which may hold the store, stays until the others have finished too."""
        with suppress(RuntimeError):
            self.store.set(f"done/{self.rank}", "1")
            self.store.add("done", 1)
            begun = time.monotonic()
            while self.rank == 0 and self.store.add("done", 0) < self.world:
                if limit is not None and time.monotonic() - begun > limit:
                    break
                time.sleep(self.interval / 10)
        self._over.set()

    def report(self, exception: BaseException) -> PenteractError:
        """Tell the others of this rank's failure; returns the error that it leaves with.

        That is PeerLost where the exception is only a connection that another rank's failure broke.
        """
        if is_of_a_peer(exception):
            return self._blame(exception)
        error = from_exception(exception)
        row = record(self.run_dir, error, exception, rank=self.rank, write=False)
        first = self._set_abort(row)
        if first["rank"] == self.rank or first["code"] != error.code:
            rundir.append_row(self.run_dir, row)
        return error

    def end(self, exception: BaseException) -> NoReturn:
        """End this process, with the exception's own exit code or, if it is another rank's fault, with 72."""
        self._take_over()
        if isinstance(exception, KeyboardInterrupt):
            _exit("", 130)
        if isinstance(exception, Preempted):  # all ranks agreed: nobody has to be stopped
            if self.rank == 0:
                record(self.run_dir, exception, exception, rank=0)
            self.finish(limit=PARTING)
            _exit(str(exception), exception.exit_code)
        error = self.report(exception)
        if isinstance(error, PeerLost):
            self._tear_down()
        self._linger()
        _exit(str(error), error.exit_code)

    # ---- looking, by the threads -----------------------------------------------------------------------------

    def _look(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            try:
                self.store.set(f"beat/{self.rank}", str(self._turns))
                now = time.monotonic()
                # A turn counts for little however long it took: if all were suspended together, nobody is lost.
                self._watch_next(min(now - last, 2 * self.interval))
                last = now
                if self.store.check([ABORT]):
                    return self._leave(json.loads(self.store.get(ABORT)))
            except RuntimeError as e:
                return self._leave(self._store_is_gone(str(e)))
            self._turns += 1
            self._over.wait(self.interval)

    def _watch_next(self, passed: float) -> None:
        """Look at the next rank that has not finished; set the abort key when it was silent for too long."""
        watched = self._seen[0] if self._seen[0] != self.rank else (self.rank + 1) % self.world
        while watched != self.rank and self.store.check([f"done/{watched}"]):
            watched = (watched + 1) % self.world
        if watched == self.rank:
            return
        beat = self._beat(watched)
        self._silence = self._silence + passed if (watched, beat) == self._seen else 0.0
        self._seen = (watched, beat)
        if self._silence > self.timeout:
            self._lost([watched], f"no sign of life for {self._silence:.0f} s")

    def _guard(self) -> None:
        """The look itself can block for ever, in a store whose host has stopped; this thread does not touch it."""
        seen, silence = -1, 0.0
        while not self._over.wait(self.interval):
            silence = silence + self.interval if seen == self._turns else 0.0
            seen = self._turns
            if silence > self.timeout:
                return self._leave(self._store_is_gone(f"no answer for {silence:.0f} s"))

    def _beat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""

    # ---- whose fault -----------------------------------------------------------------------------------------

    def _blame(self, exception: BaseException) -> PenteractError:
        """A connection broke: the abort key says why, or else the ranks whose beat stands still are the lost ones."""
        try:
            before, until = self._beats(), time.monotonic() + BLAME
            while time.monotonic() < until:
                if self.store.check([ABORT]):
                    return self._peer(json.loads(self.store.get(ABORT)))
                time.sleep(self.interval / 5)
            after = self._beats()
            lost = [r for r, beat in after.items() if r != self.rank and beat == before[r]]
            if lost:
                return self._peer(self._lost(lost, "its connections broke"))
        except RuntimeError as e:
            return self._peer(self._store_is_gone(str(e)))
        error = PeerLost("CONNECTION", f"a collective failed: {str(exception).splitlines()[0][:200]}",
                         where=f"rank {self.rank}", fix="--resume goes on from the last checkpoint")  # fmt: skip
        row = record(self.run_dir, error, exception, rank=self.rank, write=False)
        if self._set_abort(row) == row:
            rundir.append_row(self.run_dir, row)
        return error

    def _beats(self) -> dict[int, bytes]:
        return {r: self._beat(r) for r in range(self.world) if not self.store.check([f"done/{r}"])}

    def _lost(self, ranks: list[int], why: str) -> dict[str, Any]:
        """Tell all that ranks are gone without a word; the first to notice writes the row."""
        names = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
        error = PeerLost("LOST", f"rank {names} is gone or hangs: {why}", where=str(self.run_dir),
                         fix="look for a killed process (out of host memory?); --resume goes on")  # fmt: skip
        row = record(self.run_dir, error, None, rank=ranks[0], write=False, noticed_by=self.rank)
        first = self._set_abort(row)
        if first == row:
            rundir.append_row(self.run_dir, row)
        return first

    def _store_is_gone(self, why: str) -> dict[str, Any]:
        """Without the store the run's directory may still say who failed; if not, rank 0 or its launcher did."""
        own = [row for row in rundir.errors(self.run_dir, self._errors_from) if row.get("noticed_by") is None]
        if own:
            return own[0]
        error = PeerLost("LOST", f"the store of rank 0 or its launcher is gone: {why.splitlines()[0][:120]}",
                         where=str(self.run_dir), fix="--resume goes on from the last checkpoint")  # fmt: skip
        return record(self.run_dir, error, None, rank=0, noticed_by=self.rank)

    def _set_abort(self, row: dict[str, Any]) -> dict[str, Any]:
        """Set the abort key unless it is there; returns the row that is in it."""
        short = {k: v for k, v in row.items() if k != "traceback"}
        try:
            first = json.loads(self.store.compare_set(ABORT, "", json.dumps(short)))
        except RuntimeError:  # no store: the file has to do
            return row
        return row if first == short else first

    # ---- the end ---------------------------------------------------------------------------------------------

    def _leave(self, row: dict[str, Any]) -> None:
        """End this process because of `row`, unless the main thread is ending it by itself."""
        self.row = row
        if self._over.wait(GRACE) or not self._leaving.acquire(blocking=False):
            return
        error = self._peer(row)
        self._tear_down()
        self._linger()
        _exit(str(error), error.exit_code)

    def _take_over(self) -> None:
        """The main thread ends this process, or waits for the thread that already does."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()

    def _peer(self, row: dict[str, Any]) -> PenteractError:
        code, what = row["code"], row["what"]
        return PeerLost("PEER", f"rank {row['rank']} failed with {code}: {what}", where=f"rank {self.rank}",
                        fix=f"see {self.run_dir / rundir.ERRORS}")  # fmt: skip

    def _tear_down(self) -> None:
        """Give blocked collectives a chance to end; it may itself block, so not for long."""
        thread = threading.Thread(target=_quietly, args=(self.abort,), daemon=True)
        thread.start()
        thread.join(TEARDOWN)

    def _linger(self) -> None:
        """Rank 0 may hold the store: the others look there once more before it goes."""
        if self.rank == 0:
            time.sleep(2 * self.interval + GRACE)


def abort_groups() -> None:
    """Tear down all process groups of this rank."""
    abort: Callable[[], None] | None = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized():
        abort()

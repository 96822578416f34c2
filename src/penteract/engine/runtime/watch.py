"""Failure detection: a rank that fails reports it in the store; a thread on every rank watches the store, and ends its
process.

Twice a second each rank writes a heartbeat to the store, which says how far its main thread is, and reads an abort key
and the heartbeat of the next rank that is still training. Ranks watch each other in a ring, so that the store's load
grows linearly with their number; of many ranks each beats less often (`hangs/pace.py`). Where main threads make no
progress, one rank finds the culprit (`hangs/finder.py`). A rank that must end while its main thread is blocked exits
its process at once, because nothing else ends a wait in gloo.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penteract.engine.comm.groups import abort_groups
from penteract.engine.rank.failures import first_line, from_exception, is_of_a_peer
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.rank.run_key import RunKey
from penteract.engine.rank.signed_store import SignedStore
from penteract.engine.rank.stopping import Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.exits import exit_later, exit_now
from penteract.engine.runtime.hangs.alone import AloneWatch, error_alone
from penteract.engine.runtime.hangs.blame import Verdict, unlike
from penteract.engine.runtime.hangs.finder import Finder, read
from penteract.engine.runtime.hangs.own_watch import OwnWatch, hung_row, stacks
from penteract.engine.runtime.hangs.pace import Pace
from penteract.engine.runtime.hangs.record import Own, Record, decode, encode
from penteract.errors import Bug, PeerLost, PenteractError, Preempted

GRACE_S = 1.0  # for a rank's own error to be reported before another rank's ends it
TEARDOWN_S = 3.0  # for the teardown of process groups
PARTING_S = 8.0  # rank 0 waits so long for the others when all stop together

HUNG_TEARDOWN_S = 1.0  # the same, of a run that hangs
_ABORT, _BLAMES = "abort", "blames"
_OF_ALL = ("HUNG", "UNLIKE")  # errors that all ranks end with
_FIXES = {
    "HUNG": "its log and its host say why; --limits.{phase} waits longer; --resume continues from the last checkpoint",
    "UNLIKE": "all ranks must call the same collectives in the same order: report it; --resume continues from the last "
    "checkpoint",
}  # fmt: skip


class Watcher:
    """Watches the other ranks, from `start` to `finish` or `end`.

    `abort` is called before this process ends because of another rank; it may block.
    `key`: what signs the rows of the store. `pace`: how often ranks beat; that of a world of this size.
    `launcher_reports`: a launcher prints what errors.jsonl says, so this rank need not.
    """

    def __init__(  # noqa: PLR0913 (the last is for tests)
        self, store: dist.distributed_c10d.Store, rank: int, world: int, run_dir: Path, abort: Callable[[], None],
        stopping: Stopping | None = None, progress: RankProgress | None = None, *, key: RunKey | None = None,
        pace: Pace | None = None,
    ) -> None:  # fmt: skip
        # A separate connection: a blocking wait of the main thread may hold the other.
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue] - not in its stub
        self.store = SignedStore(own, "watch", rank, key)
        self.rank, self.world, self.run_dir, self.abort = rank, world, run_dir, abort
        self.pace, self.launcher_reports = pace or Pace.of(world), False
        self.stopping, self.progress = stopping or Stopping(), progress or RankProgress()
        self._own = Own(self.progress, socket.gethostname())
        self._finder = Finder(self.store, rank, world, self.pace)
        self._own_watch = OwnWatch(self.progress, rank, alone=False)
        self._patient = False
        self._stopped = False  # whether a signal had asked this rank to stop when it noticed another's failure
        self.run_code = 0  # the exit code of the rank that failed first, once this one ends because of it
        self.final: Callable[[int], None] = lambda code: None  # called with the exit code of the rank that failed first
        self.parting: Callable[[], None] = lambda: None  # called last, where this thread ends the process
        self._ticks = 0
        self._silence = 0.0  # seconds without a heartbeat of the watched rank, counted in this thread's ticks
        self._last_beat: tuple[int, bytes] = (rank, b"")  # the watched rank and its last heartbeat
        self._earlier = rundir.errors_size(run_dir)
        self._over = threading.Event()
        self._leaving = threading.Lock()  # held by the one thread that ends this rank's work
        self._beats: threading.Thread | None = None  # the first of the two threads

    def start(self) -> None:
        """Start the two daemon threads: heartbeat and watch, and a guard over the first."""
        self._beats = threading.Thread(target=self._watch, name="watch-beat", daemon=True)
        self._beats.start()
        threading.Thread(target=self._guard, name="watch-guard", daemon=True).start()

    # ---- ending, called by the main thread -------------------------------------------------------------------

    def finish(self, limit: float | None = None) -> None:
        """This rank has finished without an error. Rank 0, which may host the store, waits for the others, at most
        `limit` seconds."""
        self.progress.enter("done")
        with suppress(RuntimeError):
            self._finder.release()
            self.store.set(f"done/{self.rank}", "1")
            start, others = time.monotonic(), self.world - 1 if self.rank == 0 else 0
            while others and (limit is None or time.monotonic() - start <= limit):
                if self.store.get(f"done/{others}"):  # who has finished stays so: each is waited for in turn
                    others -= 1
                else:
                    time.sleep(self.pace.beat / 10)
        self._over.set()
        if self._beats is not None:  # an interpreter that ends while a thread is inside of the store aborts
            self._beats.join(GRACE_S)

    def report(self, exception: BaseException) -> PenteractError:
        """Report this rank's failure to the others; returns the error with which this rank ends.

        That is PeerLost if the exception is only a connection that another rank's failure broke.
        """
        if is_of_a_peer(exception):
            return self._blame(exception)
        error = from_exception(exception)
        row = rundir.error_row(error, self.rank, exception)
        first = self._set_abort(row)
        if first is row or first["code"] != error.code:  # if all ranks fail with the same error, one row is enough
            rundir.append_error(self.run_dir, row)
        return error

    def end(self, exception: BaseException) -> PenteractError:
        """Report, wait until the others can have read it, and return the error for the caller to raise."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending this process
        if isinstance(exception, KeyboardInterrupt):
            exception = Preempted("STOPPED", "interrupted before a step was saved", where=str(self.run_dir))
        exit_later(from_exception(exception).exit_code)
        self._stopped = self.stopping.signalled_before
        if isinstance(exception, Preempted):  # all ranks stop together, so there is nothing to report
            if self.rank == 0:
                rundir.append_error(self.run_dir, rundir.error_row(exception, 0))
            self.finish(limit=PARTING_S)
            return exception
        error = self.report(exception)
        if error.code == "CONNECTION" and self._stopped:
            error = self._stopped_too(error.what)
        self._part(error)
        return error

    def stopped(self) -> None:
        """Tell the others that a request ends this rank at once. Any thread may call it."""
        error = Preempted("STOPPED", "stopped at once", where=str(self.run_dir))
        self._set_abort(rundir.error_row(error, self.rank))

    # ---- watching, in the threads ----------------------------------------------------------------------------

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            try:
                now = time.monotonic()
                # Cap the time of one tick: if all processes were suspended together, no rank is lost.
                passed, last = min(now - last, 2 * self.pace.beat), now
                own = self._own.next(self._ticks, passed)
                self.store.set(f"beat/{self.rank}", encode(own))
                self._watch_next(passed)
                if (hung := self._own_watch.tick(own)) is not None:
                    self._first(hung_row(hung, own, self.run_dir, stacks()))
                elif (verdict := self._finder.tick(own, passed)) is not None:
                    self._tell(verdict, self._finder.records)
                text = self.store.get(_ABORT)
                row = json.loads(text) if text else None
            except RuntimeError as e:
                if self._over.wait(GRACE_S) or (self.stopping.watches_parent and self._saved_without_store()):
                    return None
                row = self._store_is_gone(str(e))
            if row is not None:
                return self._leave(row)
            self._ticks += 1
            self._over.wait(self.pace.beat)

    def _saved_without_store(self) -> bool:
        """torchrun holds the store, and has ended. Ranks are still connected: they save and stop, as when a signal asks
        them to. Whether this rank did in time."""
        self._patient = True
        self.stopping.ask(0)
        return self._over.wait(self.stopping.patience)

    def _watch_next(self, passed: float) -> None:
        """Check the heartbeat of the next rank that has not finished. Set the abort key if there was none for `timeout`
        seconds. `passed`: seconds since the last check."""
        watched = self._last_beat[0] if self._last_beat[0] != self.rank else (self.rank + 1) % self.world
        if watched == self.rank:
            return
        beat = self.store.get(f"beat/{watched}")
        if not beat and watched == self._last_beat[0]:  # none, or none of this run: as if nothing had come
            beat = self._last_beat[1]
        if (watched, beat) != self._last_beat:
            self._silence, self._last_beat = 0.0, (watched, beat)
        elif self.store.get(f"done/{watched}"):  # asked only of a rank without a new beat: a request less of each beat
            while watched != self.rank and self.store.get(f"done/{watched}"):
                watched = (watched + 1) % self.world
            self._silence, self._last_beat = 0.0, (watched, b"")
        else:
            self._silence += passed
        if self._silence > self.pace.timeout:
            self._lost([watched], f"no sign of life for {self._silence:.0f} s", decode(beat))

    def _guard(self) -> None:
        """The watching thread can block for ever in a store whose host has stopped. This thread watches it without
        using the store."""
        last_tick, silence = -1, 0.0
        while not self._over.wait(self.pace.beat) and not self._patient:
            silence = silence + self.pace.beat if last_tick == self._ticks else 0.0
            last_tick = self._ticks
            if silence > self.pace.timeout:
                return self._leave(self._store_is_gone(f"no answer for {silence:.0f} s"))

    def _leave(self, row: dict[str, Any]) -> None:
        """End this process because of `row`, unless the main thread is ending it."""
        hung = row["code"] in _OF_ALL
        if self._over.wait(0 if hung else GRACE_S) or not self._leaving.acquire(blocking=False):
            return
        exit_later(PeerLost.exit_code)
        self._stopped = self.stopping.signalled_before
        error = self._peer(row)
        self._part(error, HUNG_TEARDOWN_S if hung else TEARDOWN_S)
        if not (self.launcher_reports and rundir.errors(self.run_dir, self._earlier)):
            with suppress(OSError, ValueError):
                print(error, file=sys.stderr)
        self.parting()
        exit_now(error.exit_code)

    # ---- which rank failed -----------------------------------------------------------------------------------

    def _blame(self, exception: BaseException) -> PenteractError:
        """The error for a broken connection: that of the abort key; else the ranks without a new heartbeat are lost, or
        ranks have entered unlike collectives. One rank finds out, and the others wait for it a little longer."""
        try:
            finder = self.store.compare_set(_BLAMES, "", str(self.rank)) == str(self.rank).encode()
            before = read(self.store, self.world) if finder else {}
            if (row := self._failure_row(self.pace.blame + (0 if finder else 2 * GRACE_S))) is not None:
                return self._peer(row)
            after = read(self.store, self.world) if finder else {}
            lost = [r for r, record in after.items()
                    if r != self.rank and record.tick == before[r].tick and record.phase != "done"]  # fmt: skip
            if lost:
                return self._peer(self._lost(lost, "its connections broke", after[lost[0]]))
            if (verdict := unlike(after)) is not None:
                return self._peer(self._tell(verdict, after))
        except RuntimeError as e:
            return self._peer(self._store_is_gone(str(e)))
        error = PeerLost("CONNECTION", f"a collective failed: {first_line(exception)}", where=f"rank {self.rank}",
                         fix="--resume continues from the last checkpoint")  # fmt: skip
        row = rundir.error_row(error, self.rank, exception)
        if self._set_abort(row) is row:
            rundir.append_error(self.run_dir, row)
        return error

    def _failure_row(self, seconds: float) -> dict[str, Any] | None:
        """Wait for the abort key."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if text := self.store.get(_ABORT):
                return json.loads(text)
            time.sleep(self.pace.beat / 5)
        return None

    def _lost(self, ranks: list[int], why: str, last: Record) -> dict[str, Any]:
        """Report to all that ranks are lost; the first rank to notice writes the row. `last`: of the first."""
        names = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
        error = PeerLost("LOST", f"rank {names} is gone or hangs: {why}", where=str(self.run_dir),
                         found=f"{last.where()}, on host {last.host}" if last.host else "",
                         fix="its log and its host say why; --resume continues from the last checkpoint")  # fmt: skip
        return self._first(rundir.error_row(error, ranks[0], noticed_by=self.rank))

    def _tell(self, verdict: Verdict, records: Mapping[int, Record]) -> dict[str, Any]:
        """Report to all what a hung run waits for; the first rank to find it writes the row."""
        first = records[verdict.ranks[0]]
        error = PeerLost(verdict.code, verdict.what, where=str(self.run_dir),
                         fix=_FIXES[verdict.code].format(phase=first.limited_by))  # fmt: skip
        row = rundir.error_row(error, verdict.ranks[0], noticed_by=self.rank, culprits=list(verdict.ranks[:64]))
        return self._first(row | {"host": first.host})

    def _first(self, row: dict[str, Any]) -> dict[str, Any]:
        """Set the abort key; the row that it holds is written once."""
        first = self._set_abort(row)
        if first is row:
            rundir.append_error(self.run_dir, row)
        return first

    def _store_is_gone(self, why: str) -> dict[str, Any]:
        """The row to end with when the store is gone: the first in errors.jsonl; else rank 0 or its launcher is
        lost."""
        if rows := rundir.errors(self.run_dir, self._earlier):
            return rows[0]
        error = PeerLost("LOST", f"the store of rank 0 or its launcher is gone: {why.splitlines()[0][:120]}",
                         where=str(self.run_dir), fix="--resume continues from the last checkpoint")  # fmt: skip
        row = rundir.error_row(error, 0, noticed_by=self.rank)
        rundir.append_error(self.run_dir, row)
        return row

    def _set_abort(self, row: dict[str, Any]) -> dict[str, Any]:
        """Set the abort key unless it is set; returns the row that it holds."""
        short = {k: v for k, v in row.items() if k != "traceback"}
        try:
            first = json.loads(self.store.compare_set(_ABORT, "", json.dumps(short)))
        except RuntimeError:  # no store: only errors.jsonl is left
            return row
        return row if first == short else first

    # ---- the end ---------------------------------------------------------------------------------------------

    def _peer(self, row: dict[str, Any]) -> PenteractError:
        """The error with which this rank ends because of another's row. Where a signal had asked this rank to stop, a
        lost rank was killed for it: the run can go on later."""
        if row["exit_code"] != Preempted.exit_code:  # that rank leaves it, if anything was trained
            self.final(int(row["exit_code"]))
        what = f"rank {row['rank']} failed with {row['code']}: {row['what']}"
        stopped = row["exit_code"] == Preempted.exit_code or (row["exit_code"] == PeerLost.exit_code and self._stopped)
        if stopped and row["code"] not in _OF_ALL:
            return self._stopped_too(what)
        self.run_code = int(row["exit_code"])
        if row["code"] in _OF_ALL:
            return PeerLost(row["code"], row["what"], where=row["where"], fix=row["fix"])
        return PeerLost("PEER", what, where=f"rank {self.rank}", fix=f"see {self.run_dir / rundir.ERRORS}")

    def _stopped_too(self, found: str) -> Preempted:
        return Preempted("STOPPED", "stopped before this step was saved", where=str(self.run_dir), found=found,
                         fix="--resume continues from the last checkpoint, if there is one")  # fmt: skip

    def _part(self, error: PenteractError, teardown: float = TEARDOWN_S) -> None:
        """Tear down process groups, and give the others time to read the abort key."""
        if isinstance(error, PeerLost | Preempted):  # if this works, blocked collectives end and GPUs come free
            thread = threading.Thread(target=self.abort, daemon=True)
            thread.start()
            thread.join(teardown)
        if self.rank == 0:  # it may host the store: the others must read it once more
            with suppress(OSError):
                code = self.run_code or error.exit_code
                rundir.write_status(self.run_dir, rundir.ended(code), exit_code=code)
            time.sleep(2 * self.pace.beat + GRACE_S)


@contextmanager
def watched(
    rank: Rank, run_dir: Path, stopping: Stopping | None = None, final: Callable[[int], None] = lambda code: None,
    parting: Callable[[], None] = lambda: None, *, launcher_reports: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Train inside this context. This rank's failure is reported to the others and raised as a PenteractError; a
    failure of theirs ends this process, and so does a hang. `final` is called with the exit code of the rank that
    failed first; `parting` last, where a thread ends this process and nothing else of it runs.

    Writes `status.json` and `errors.jsonl`. `launcher_reports`: a launcher prints what `errors.jsonl` says.
    """
    stopping = stopping or Stopping()
    watcher, alone = None, None
    if rank.store is None:
        alone = AloneWatch(rank.progress, run_dir, final, parting, launcher_reports=launcher_reports)
        alone.start()
    else:
        watcher = Watcher(rank.store, rank.number, rank.world, run_dir, abort_groups, stopping, rank.progress,
                          key=rank.key)  # fmt: skip
        watcher.final, watcher.parting = final, parting
        watcher.launcher_reports = launcher_reports
        watcher.start()
    code = Bug.exit_code
    if rank.number == 0:
        stopped = rundir.ended(Preempted.exit_code), Preempted.exit_code
        stopping.before_leaving.append(lambda: rundir.write_status(run_dir, stopped[0], exit_code=stopped[1]))
        rundir.write_status(run_dir, "running", world=rank.world)
    if watcher is not None:
        stopping.before_leaving.append(watcher.stopped)  # the last: it asks the store, which may be gone
    try:
        yield
        if watcher is not None:
            watcher.finish()
        code = 0
    except BaseException as e:
        error = watcher.end(e) if watcher is not None else error_alone(e, run_dir)
        code = error.exit_code
        final(code)
        if watcher is not None:  # the interpreter's normal exit would wait for lost peers in the groups' destructors
            atexit.register(exit_now, code)
        raise error from e
    finally:
        if alone is not None:
            alone.stop()
        if rank.number == 0:
            code = watcher.run_code or code if watcher is not None else code
            with suppress(OSError):
                rundir.write_status(run_dir, rundir.ended(code), exit_code=code)

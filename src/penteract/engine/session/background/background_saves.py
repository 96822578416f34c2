"""Saves in the background: how one goes, on every rank, while the run trains on.

A save begins on all ranks after the same step. Each rank's writer writes the rank's file from the snapshot; its table
goes to rank 0 through the store; when all have written, rank 0's writer commits. Nobody waits for anybody: `poll` goes
on with what can go on. A part that is missing drops the save; two in a row end the run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penteract.engine import checkpoint
from penteract.engine.checkpoint import folder as folders
from penteract.engine.checkpoint.background.writer import BackgroundWriter, WriterDied
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.engine.session.background.save_rows import SaveRows
from penteract.engine.session.background.snapshot import Snapshot
from penteract.engine.session.checkpoints import Checkpoints, ReadBack
from penteract.errors import DiskFailure, PenteractError

log = logging.getLogger("penteract")

_MOST_FAILURES = 2  # in a row
_LOOK_S = 0.02  # between looks at the others' rows, where nothing else is to be done
_Waiting = Generator[None, None, Any]


@dataclass(slots=True)
class BackgroundSaves:
    """The saves of one rank. `limit`: seconds for each answer of a writer, and for the parts
    of other ranks (`limits.save`).

    All ranks `start` one after the same step, when no rank has one under way. `last` of `checkpoints` is the step that
    was committed last.
    """

    checkpoints: Checkpoints
    snapshot: Snapshot
    writer: BackgroundWriter
    limit: float
    rows: SaveRows = field(init=False)
    number: int = 0  # of the last save that was started
    failures: int = 0  # in a row; known to rank 0
    _prunes: bool = True
    _table: RankTable | None = None  # of what this rank wrote last
    _course: Iterator[None] | None = None

    def __post_init__(self) -> None:
        """Nothing is under way."""
        self.rows = SaveRows(self.checkpoints.rank)

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and not ended."""
        return self._course is not None

    def start(self, step: int, extra: dict[str, Any]) -> None:
        """Begin to save the present state, which is that of `step`. Called by all ranks."""
        assert self._course is None, "one save at a time"
        own, rank = self.checkpoints, self.checkpoints.rank
        self.number += 1
        fresh = folders.unfinished(own.folder, step, own.epoch)
        if rank.number == 0:
            with checkpoint.failing(own.folder, "prepare a checkpoint's folder"):
                folders.clear(own.folder, own.epoch)
                fresh.mkdir()
        self.rows.begin(self.number)
        rank.barrier()
        self.snapshot.take()
        self._course = self._counted(self._save(step, fresh, extra))
        self.poll()

    def poll(self) -> None:
        """Go on with the save that is under way, if it can go on. Raises what ends the run."""
        if self._course is None:
            return
        course, self._course = self._course, None  # one that fails is over
        for _ in course:
            self._course = course
            return

    def finish(self, *, prune: bool = True) -> None:
        """Wait until the save that is under way has ended. `prune` False: the run is ending with an error, so nothing
        is removed."""
        self._prunes = self._prunes and prune
        if self._course is not None:
            self.snapshot.settle()  # no update comes that would copy the rest
        self.poll()
        while self._course is not None:
            self.writer.wait(_LOOK_S)
            self.checkpoints.rank.progress.ticks += 1  # what takes too long is dropped
            self.poll()

    def close(self) -> None:
        """End the writer."""
        self.writer.close()

    # ---- the course of a save ------------------------------------------------------------------------------------

    def _counted(self, course: Iterator[None]) -> _Waiting:
        """A save in which nothing failed ends a row of failures."""
        before = self.failures
        yield from course
        if self.failures == before:
            self.failures = 0

    def _save(self, step: int, fresh: Path, extra: dict[str, Any]) -> _Waiting:
        own = self.checkpoints
        outcome = yield from self._decided(step, fresh, extra) if own.rank.number == 0 else self._outcome(fresh)
        if outcome != "committed":
            self.writer.kill()  # what it may still write is of no use
            return
        own.last = step
        at = folders.step_folder(own.folder, step)
        if self._prunes:
            yield from self._tidied()
            assert self._table is not None
            own.commit_seen(ReadBack(at, self._table, whole=own.rank.number == 0))

    def _part(self, fresh: Path) -> _Waiting:
        """Write this rank's part, and tell."""
        while not self.snapshot.arrived():
            yield
        try:
            table = yield from self._ask("write", fresh=str(fresh))
        except WriterDied as e:
            self.rows.failed(self.number, f"its writer {e}")
        else:
            self._table = RankTable.parse(table)
            self.rows.written(self.number, table)

    def _ask(self, do: str, payload: bytes = b"", **about: Any) -> _Waiting:
        """Ask the writer. One that does not answer in time counts as dead."""
        asking = self.writer.ask(do, payload, **about)
        while True:
            try:
                next(asking)
            except StopIteration as done:
                return done.value
            if time.monotonic() > self.writer.asked + self.limit:
                self.writer.kill()
                raise WriterDied(f"has not answered for {self.limit:.0f} s (limits.save)")
            yield

    def _outcome(self, fresh: Path) -> _Waiting:
        """Write this rank's part until rank 0 has told how the save ended."""
        part: Iterator[None] | None = self._part(fresh)
        while not (outcome := self.rows.outcome(self.number)):
            if part is not None and next(part, part) is part:
                part = None
            yield
        return outcome

    def _decided(self, step: int, fresh: Path, extra: dict[str, Any]) -> _Waiting:
        """Rank 0: write its part, wait for those of others, commit, and tell."""
        yield from self._part(fresh)
        tables, why = yield from self._collected()
        if not why:
            try:
                own = self.checkpoints
                lines = "\n".join([json.dumps(extra), *tables]).encode()  # tables are not parsed here: there are many
                yield from self._ask("commit", lines, folder=str(own.folder), step=step, epoch=own.epoch)
            except WriterDied as e:
                if not self._is_committed(step):
                    why = f"the writer that commits it {e}"
        self.rows.decide(self.number, "dropped" if why else "committed")
        if why:
            self._failed(f"the checkpoint of step {step} is dropped: {why}")
        return "dropped" if why else "committed"

    def _collected(self) -> _Waiting:
        """The tables of all ranks in their order, and why there are none; "" if they are all there."""
        missing, tables = set(range(self.checkpoints.rank.world)), dict[int, str]()
        until = time.monotonic() + self.limit
        while missing:
            for rank, part in self.rows.parts(sorted(missing)).items():
                if part.number != self.number or part.state == "begun":
                    continue
                if part.state == "failed":
                    return [], f"rank {rank} has not written its part: {part.detail}"
                if table := self.rows.table(rank, int(part.detail)):
                    tables[rank] = table
                    missing.discard(rank)
            if missing and time.monotonic() > until:
                return [], f"rank {min(missing)} has not written its part in {self.limit:.0f} s (limits.save)"
            if missing:
                yield
        return [tables[rank] for rank in sorted(tables)], ""

    def _is_committed(self, step: int) -> bool:
        """Whether the step is there as this epoch's: its writer died in a commit."""
        own = self.checkpoints
        at = folders.step_folder(own.folder, step)
        there = any((one.epoch, one.step, one.at) == (own.epoch, step, at) for one in folders.committed(own.folder))
        fresh = folders.unfinished(own.folder, step, own.epoch)
        if not there or fresh.exists():
            return False
        try:
            folders.check(at)
        except PenteractError:
            return False
        return True

    def _tidied(self) -> _Waiting:
        """After a commit: the checkpoint before is proven if all ranks have read it back, because finite steps were
        trained after it. Then old ones are removed."""
        own, before = self.checkpoints, self.checkpoints.before
        if before is not None and before.read_back is not None:
            until = time.monotonic() + self.limit
            while (reading := before.read_back.is_reading) and time.monotonic() < until:
                yield
            late = f"rank {own.rank.number} has not read it back in {self.limit:.0f} s (limits.save)"
            self.rows.has_read(self.number, late if reading else str(before.read_back.result() or ""))
        if own.rank.number:
            return
        error = ""
        if before is not None and before.read_back is not None:
            error = yield from self._read_by_all()
            if error:
                log.warning("%s is not known to be on the disk as it was written: %s", before.at.name, error)
        proven = "" if before is None or error else before.at.name
        try:
            yield from self._ask("tidy", folder=str(own.folder), proven=proven, keep=own.keep, epoch=own.epoch)
        except WriterDied as e:
            self._failed(f"old checkpoints are not removed: the writer {e}")

    def _read_by_all(self) -> _Waiting:
        """What is wrong with the checkpoint before; "" if all ranks have read it back."""
        until = time.monotonic() + self.limit
        while len(reads := self.rows.reads(self.number)) < self.checkpoints.rank.world:
            if time.monotonic() > until:
                return f"{self.checkpoints.rank.world - len(reads)} ranks have not read it back"
            yield
        return next((error for _, error in sorted(reads.items()) if error), "")

    def _failed(self, what: str) -> None:
        """Say it; raise DiskFailure at the second time in a row."""
        self.failures += 1
        if self.failures >= _MOST_FAILURES:
            raise DiskFailure("SAVE", f"{what}; so was the one before", where=str(self.checkpoints.folder),
                              fix="look at what ended it, or --checkpoint.asynchronous false")  # fmt: skip
        log.warning("%s; training goes on", what)

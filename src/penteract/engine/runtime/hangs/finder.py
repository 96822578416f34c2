"""Finding what a hung run waits for: one rank at a time reads the records of all, so the store is read O(world) times.

A rank without progress asks for the part of the finder, and gives it back when it goes on. It reads the records shortly
before its limit, to see whose beats stop, and then at its limit and every second, or with every beat where beats are
rarer, until something changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from penteract.engine.rank.signed_store import SignedStore
from penteract.engine.runtime.hangs.blame import Verdict, blame
from penteract.engine.runtime.hangs.pace import Pace
from penteract.engine.runtime.hangs.record import Record, decode

_FINDER = "finder"


class Finder:
    """One rank's part. A rank counts as silent after `pace.timeout` seconds without beats; half the limit if that is
    less."""

    def __init__(self, store: SignedStore, rank: int, world: int, pace: Pace) -> None:
        self.store, self.rank, self.world, self.pace = store, rank, world, pace
        self.records: Mapping[int, Record] = {}  # as read last
        self._mine = False
        self._quiet: dict[int, float] = {}  # seconds without a new beat
        self._since = 0.0  # seconds since the records were read

    def tick(self, own: Record, passed: float) -> Verdict | None:
        """What to end the run with. Called at each beat, `passed` seconds after the last."""
        silence = max(self.pace.shortest, min(self.pace.timeout, own.limit / 2))
        if own.phase == "done" or own.idle <= 0 or own.idle < own.limit - silence:
            self.release()
            return None
        self._since += passed
        if not self._mine:
            if self.store.compare_set(_FINDER, "", str(self.rank)) != str(self.rank).encode():
                return None
            self._mine, self._quiet = True, {}
            self._read()
        elif self._since >= self.pace.look and own.hangs:
            self._read()
        else:
            return None
        if not own.hangs:
            return None
        quiet = {r for r, seconds in self._quiet.items() if r != self.rank and seconds >= silence - self.pace.late}
        return blame({**self.records, self.rank: own}, quiet)

    def release(self) -> None:
        """Let another rank be the finder."""
        if self._mine:
            self._mine = False
            with suppress(RuntimeError):
                self.store.compare_set(_FINDER, str(self.rank), "")

    def _read(self) -> None:
        found = read(self.store, self.world)
        for r, record in found.items():
            same = r in self.records and self.records[r].tick == record.tick and record.phase != "done"
            self._quiet[r] = self._quiet.get(r, 0.0) + self._since if same and r in self._quiet else 0.0
        self.records, self._since = found, 0.0


def read(store: SignedStore, world: int) -> dict[int, Record]:
    """The last record of each rank; an empty one for a rank without. Each key is read once, and looked for at most
    twice."""
    keys = [f"beat/{r}" for r in range(world)]
    if not store.check(keys):
        return {r: decode(store.get(key)) for r, key in enumerate(keys)}
    return {r: decode(beat) for r, beat in enumerate(store.multi_get(keys))}

"""What ranks tell each other about a save, by rows of their store: no rank waits for another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penteract.engine.rank.rank import Rank
from penteract.engine.rank.signed_store import SignedStore

_CHUNK = 2**20  # characters of a row: torch's store takes 8 MiB


class PartRow(NamedTuple):
    """A rank's part of save `number`. `state`: begun, written or failed. `detail`: of a written one how many rows its
    table has, of a failed one why."""

    number: int
    state: str
    detail: str


@dataclass(slots=True)
class SaveRows:
    """The rows of one rank. Each save writes the same rows again, so the store does not grow."""

    rank: Rank
    _store: SignedStore | None = None
    _own: dict[str, str] = field(default_factory=dict[str, str])  # of a run of one rank

    def __post_init__(self) -> None:
        """A run of one rank has no store."""
        if self.rank.store is not None:
            self._store = SignedStore(self.rank.store, "save", self.rank.number, self.rank.key)

    def begin(self, number: int) -> None:
        """This rank has begun save `number`. Called by all ranks, before a barrier: from now on all rows exist."""
        self._put_json("part", number, "begun", "")
        self._put_json("read", 0, "")
        if self.rank.number == 0:
            self._put("outcome", json.dumps([number - 1, ""]))

    def written(self, number: int, table: str) -> None:
        """This rank has written its part."""
        chunks = [table[at : at + _CHUNK] for at in range(0, len(table), _CHUNK)]
        for i, chunk in enumerate(chunks):
            self._put(f"table/{self.rank.number}/{i}", chunk)
        self._put_json("part", number, "written", str(len(chunks)))

    def failed(self, number: int, why: str) -> None:
        """This rank could not write its part."""
        self._put_json("part", number, "failed", why)

    def parts(self, ranks: Sequence[int]) -> dict[int, PartRow]:
        """The parts of these ranks, as far as they are there."""
        found = zip(ranks, self._get([f"part/{r}" for r in ranks]), strict=True)
        return {r: PartRow(*json.loads(row)) for r, row in found if row}

    def table(self, rank: int, chunks: int) -> str:
        """The table of a rank that has written its part; "" if it is not there."""
        rows = self._get([f"table/{rank}/{i}" for i in range(chunks)])
        return "".join(rows) if all(rows) else ""

    def decide(self, number: int, outcome: str) -> None:
        """Rank 0 tells the others how save `number` ended: "committed" or "dropped"."""
        self._put("outcome", json.dumps([number, outcome]))

    def outcome(self, number: int) -> str:
        """How save `number` ended; "" while it has not."""
        (row,) = self._get(["outcome"])
        of, outcome = json.loads(row) if row else (0, "")
        return outcome if of == number else ""

    def has_read(self, number: int, error: str) -> None:
        """When save `number` was committed, this rank had read back the one before. `error`: "" if it is as written."""
        self._put_json("read", number, error)

    def reads(self, number: int) -> dict[int, str]:
        """rank -> what is wrong with the checkpoint before save `number`, of the ranks that have read it back."""
        everyone = range(self.rank.world)
        found = zip(everyone, self._get([f"read/{r}" for r in everyone]), strict=True)
        rows = ((r, json.loads(row)) for r, row in found if row)
        return {r: error for r, (of, error) in rows if of == number}

    def _put_json(self, name: str, *row: Any) -> None:
        self._put(f"{name}/{self.rank.number}", json.dumps(row))

    def _put(self, name: str, row: str) -> None:
        if self._store is None:
            self._own[name] = row
        else:
            self._store.set(name, row)

    def _get(self, names: Sequence[str]) -> list[str]:
        """The rows, all of which were written before; "" for those that are refused."""
        if not names:
            return []
        if self._store is None:
            return [self._own.get(name, "") for name in names]
        if not self._store.check(names):  # a stranger has removed some
            return [""] * len(names)
        return [row.decode() for row in self._store.multi_get(names)]

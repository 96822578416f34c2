"""The rows that ranks leave each other in their store, which are signed: whoever reaches the store can write to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from penteract.engine.rank.run_key import VARIABLE, NotSigned, RunKey
from penteract.errors import BadInput

log = logging.getLogger("penteract")

_TRIES = 100  # to replace a row that somebody else keeps writing
_POLL_S = 0.1
_NO_ROW = b"no row"
_FIX = f"the same {VARIABLE} for every rank, and for nobody else; a MASTER_PORT that other runs do not use"


class SignedStore:
    """The rows under `prefix` in a store. A row that this run did not sign, or signed under another name, is refused.

    `strict`: BadInput is raised for it, as at the start, where nothing is lost. Otherwise it counts as absent, and is
    said once: a stranger ends no run. There are no counters, because the store alone could sign a sum.
    """

    def __init__(
        self, store: dist.distributed_c10d.Store, prefix: str, rank: int, key: RunKey | None = None, *,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self.store = dist.distributed_c10d.PrefixStore(prefix, store)
        self.prefix, self.rank, self.key, self.strict = prefix, rank, key or RunKey(), strict
        self._refused = set[str]()

    def set(self, name: str, row: str) -> None:
        """Write a row."""
        self.store.set(name, self._sealed(name, row))  # pyright: ignore[reportArgumentType] - its stub lacks bytes

    def get(self, name: str) -> bytes:
        """The row; b"" if there is none. In one request: torch's `get` is two, and waits for a row. To compare tells
        what is there, and writes nothing, as no row is `_NO_ROW`; it is given back where there is none."""
        found = self._swapped(name, _NO_ROW, b"")
        return self._opened(name, found) if found != _NO_ROW else b""

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Rows that exist, in one request; b"" for those that are refused."""
        rows: list[bytes] = self.store.multi_get(list(names))  # pyright: ignore[reportAttributeAccessIssue] - not in its stub
        return [self._opened(name, row) for name, row in zip(names, rows, strict=True)]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these exist, in one request, whoever wrote them: a hint."""
        return self.store.check(list(names))

    def compare_set(self, name: str, expected: str, wanted: str) -> bytes:
        """Write a row if this rank's row there is `expected`; "": if there is none. -> the row that is there now."""
        fresh, old = (self._sealed(name, row) if row else b"" for row in (wanted, expected))
        for _ in range(_TRIES):
            found = self._swapped(name, old, fresh)
            if found == fresh or not found:
                return wanted.encode()
            if row := self._opened(name, found):
                return row
            old = found if found != old else b""  # a stranger's: replace it, also if it has been deleted meanwhile
        raise RuntimeError(f"somebody else keeps writing the row {self.prefix}/{name}")

    def wait(self, name: str, limit: float) -> bytes:
        """The row, once it is there. Raises DistStoreError after `limit` seconds."""
        until, least = time.monotonic() + limit, 0.001
        while True:
            self.store.wait([name], timedelta(seconds=max(until - time.monotonic(), least)))
            if row := self.get(name):
                return row
            least = 1.0  # a stranger's row is there, so the store answers at once, however busy the host is
            if time.monotonic() > until:
                raise dist.DistStoreError(f"nobody of this run has written {self.prefix}/{name}")
            time.sleep(_POLL_S)

    def _swapped(self, name: str, old: bytes, fresh: bytes) -> bytes:
        return self.store.compare_set(name, old, fresh)  # pyright: ignore[reportArgumentType] - its stub lacks bytes

    def _sealed(self, name: str, row: str) -> bytes:
        return self.key.seal(f"{self.prefix}/{name}", row.encode())

    def _opened(self, name: str, sealed: bytes) -> bytes:
        if not sealed:
            return b""
        try:
            return self.key.open(f"{self.prefix}/{name}", sealed)
        except NotSigned as e:
            self._refuse(name, str(e))
            return b""

    def _refuse(self, name: str, found: str) -> None:
        what = f"rank {self.rank} refuses a row of the ranks' store that this run has not signed"
        where = f"{self.prefix}/{name} at {self.key.at}"
        if self.strict:
            raise BadInput("STORE", what, where=where, found=found, fix=_FIX)
        if name not in self._refused:
            self._refused.add(name)
            log.warning("%s, and goes on without it · %s · found %s · fix: %s", what, where, found, _FIX)

"""The roll call: all ranks are there and agree, before any of them makes something.

Each rank leaves two rows in the store: its host with a digest of its facts, and the facts. Rank 0 alone reads them, and
answers with one. So the store is read about twice for each rank, however many there are. A row that is not signed with
the run's key ends the roll call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from penteract.engine.rank.signed_store import SignedStore
from penteract.errors import BadInput, PeerLost, PenteractError

WARN_S = 5.0  # after it, a rank logs whom it waits for
LATER_S = 15.0  # the answer may come later than this rank's own limit, because rank 0 began to wait later
READ_S = 5.0  # rank 0 waits so long for its answer to be read, because the store may end with it
_SHOWN = 3  # differences of a rank that are named
_ANSWER = "answer"

log = logging.getLogger("penteract")


@dataclass(slots=True)
class RollCall:
    """One rank's part. `facts`: what must be equal on all ranks, name -> text. `limit`: seconds, `limits.join`.
    `per_host`: ranks of this host, which have consecutive numbers; 0: not known."""

    store: SignedStore  # a strict one
    rank: int
    world: int
    host: str
    facts: Mapping[str, str]
    limit: float
    per_host: int = 0
    _began: float = field(default_factory=time.monotonic)

    def hold(self) -> None:
        """Wait until all ranks are there. Raises PeerLost on all that are there if some are missing after `limit`,
        BadInput on all ranks if their facts differ, if neighbours are on different hosts, or if a stranger has written
        to the store."""
        try:
            error = self._call()
        except BadInput as refused:
            with suppress(BadInput):
                self._answer(refused)
            raise
        if error is not None:
            raise error

    def _call(self) -> PenteractError | None:
        text = json.dumps(dict(self.facts), sort_keys=True)
        row = {"host": self.host, "per_host": self.per_host, "digest": hashlib.sha256(text.encode()).hexdigest()}
        self.store.set(f"facts/{self.rank}", text)
        first = json.loads(self.store.compare_set(f"row/{self.rank}", "", json.dumps(row | {"pid": os.getpid()})))
        if (first["host"], first["pid"]) != (self.host, os.getpid()):
            twice = BadInput("RANKS", f"two processes are rank {self.rank}", where=f"one on {first['host']}",
                             found=f"another on {self.host}", fix="a RANK of its own for each process")  # fmt: skip
            return self._answer(twice)
        return self._lead() if self.rank == 0 else self._follow()

    # ---- rank 0 ----------------------------------------------------------------------------------------------

    def _lead(self) -> PenteractError | None:
        warned = False
        everyone = [f"row/{r}" for r in range(self.world)]
        while not self.store.check(everyone) and not self.store.check([_ANSWER]):
            if (waited := time.monotonic() - self._began) > self.limit:
                break
            if waited > WARN_S and not warned:
                log.warning("waiting for %s · up to %.0f s (limits.join)", self._absent(self._missing()), self.limit)
                warned = True
            time.sleep(min(0.25, max(0.02, waited / 20)))  # a twentieth more than it takes, at most
        error: PenteractError | None = None
        if self.store.check([_ANSWER]):  # a rank that is there twice gave it
            pass
        elif missing := self._missing():
            error = PeerLost(
                "JOIN", f"{self._absent(missing)} did not join in {self.limit:.0f} s", where="limits.join",
                found=f"{self.world - len(missing)} of {self.world} ranks",
                fix="see what the missing ranks print; every rank needs the same MASTER_ADDR and MASTER_PORT",
            )  # fmt: skip
        else:
            error = self._difference()
        error = self._answer(error)
        if error is not None:
            until = time.monotonic() + READ_S
            there = set(range(1, self.world)) - set(self._missing())
            while not self.store.check([f"read/{r}" for r in there]) and time.monotonic() < until:
                time.sleep(0.02)
        return error

    def _answer(self, error: PenteractError | None) -> PenteractError | None:
        """Tell all ranks, unless they have been told; returns what they were told."""
        own = json.dumps(error and [type(error).__name__, error.as_dict()])
        answer = json.loads(self.store.compare_set(_ANSWER, "", own))  # the first answer of any rank stands
        if answer is None:
            return None
        name, row = answer
        parts = {k: row[k] for k in ("where", "found", "allowed", "fix")}
        return (BadInput if name == BadInput.__name__ else PeerLost)(row["code"], row["what"], **parts)

    def _missing(self) -> list[int]:
        return [r for r in range(self.world) if not self.store.check([f"row/{r}"])]

    def _absent(self, missing: Sequence[int]) -> str:
        """The missing ranks by number, and their hosts where other ranks of them are there."""
        hosts: dict[int, str] = {}
        if self.per_host:
            for r in range(self.world):
                if r not in missing:
                    hosts.setdefault(r // self.per_host, self._row(r)["host"])
        places = {r: hosts.get(r // self.per_host) if self.per_host else None for r in missing[:8]}
        named = ", ".join(f"{r} (host {place})" if place else str(r) for r, place in places.items())
        return f"rank{'s' * (len(missing) > 1)} {named}{', …' * (len(missing) > 8)} of {self.world}"

    def _row(self, rank: int) -> dict[str, Any]:
        return json.loads(self.store.get(f"row/{rank}"))

    def _difference(self) -> BadInput | None:
        """The error that names a rank whose facts are not those of most ranks; of two kinds as many, not rank 0's. Or
        one that is not on the host of its neighbours."""
        rows = [json.loads(text) for text in self.store.multi_get([f"row/{r}" for r in range(self.world)])]
        digests = [row["digest"] for row in rows]
        if error := _scattered(rows):
            return error
        usual = Counter(digests).most_common(1)[0][0]  # the first met, among equals
        odd = [r for r, digest in enumerate(digests) if digest != usual]
        if not odd:
            return None
        other, like = odd[0], digests.index(usual)
        theirs, ours = (json.loads(self.store.get(f"facts/{r}")) for r in (other, like))
        names = [name for name in (*ours, *(theirs.keys() - ours)) if theirs.get(name) != ours.get(name)]
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        found = "; ".join(f"{name} {theirs.get(name, 'not set')}" for name in names[:_SHOWN])
        return BadInput(
            "RANKS", f"the ranks are not alike: {', '.join(names[:8])}{', …' * (len(names) > 8)}",
            where=f"rank {other} on {rows[other]['host']}{more}", found=found,
            allowed="; ".join(ours.get(name, "not set") for name in names[:_SHOWN])
            + f", as on rank {like} on {rows[like]['host']}",
            fix="the same software, command, files and devices for every rank",
        )  # fmt: skip

    # ---- the other ranks -------------------------------------------------------------------------------------

    def _follow(self) -> PenteractError | None:
        try:
            self.store.wait(_ANSWER, self.limit + LATER_S)
        except dist.DistStoreError:
            if self.store.check(["row/0"]):  # rank 0 came late, and waits for others until its own limit
                self.store.wait(_ANSWER, self.limit + LATER_S)
            else:
                return PeerLost("JOIN", f"rank 0 of {self.world} did not join in {self.limit:.0f} s",
                                where=f"limits.join, rank {self.rank} on {self.host}",
                                fix="see what rank 0 prints")  # fmt: skip
        error = self._answer(None)
        self.store.set(f"read/{self.rank}", "yes")
        return error


def _scattered(rows: Sequence[Mapping[str, Any]]) -> BadInput | None:
    """The error that names a rank on another host than those with which it should share one: layouts put ranks that
    talk most on one host, by their numbers. Of a rank whose launcher gave no number of ranks a host nothing is known.
    Hosts that have one name count as one, as several containers of an image may."""
    for r, row in enumerate(rows):
        first = r - r % per_host if (per_host := row["per_host"]) else r
        if row["host"] == rows[first]["host"]:
            continue
        last = min(first + per_host, len(rows)) - 1
        return BadInput(
            "RANKS", f"ranks {first} and {r} belong on one host", where=f"rank {r} on {row['host']}",
            found=f"rank {first} on {rows[first]['host']}",
            allowed=f"ranks {first} to {last} on one host (LOCAL_WORLD_SIZE={per_host})",
            fix="number ranks host by host: srun --distribution=block, or torchrun; LOCAL_WORLD_SIZE is how many each "
            "host has",
        )  # fmt: skip
    return None

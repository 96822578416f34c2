"""What a rehearsal finds wrong: one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 20  # lines that are kept: one fault often shows many times


class Fault(NamedTuple):
    """`code`: its kind in capitals; `what`: one line; `where`: the action, op or bucket; `rank`: on which."""

    code: str
    what: str
    where: str
    rank: int

    def __str__(self) -> str:
        return f"mismatch[{self.code}]: rank {self.rank} · {self.what} · {self.where}"


class Stop(Exception):
    """A walk that cannot go on after a fault."""


@dataclass(slots=True)
class Findings:
    """The faults of one rank, each once. `at`: what its walk is doing."""

    rank: int
    at: str = "the start"
    faults: list[Fault] = field(default_factory=list[Fault])
    _seen: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def add(self, code: str, what: str, where: str = "", *, once: str = "") -> None:
        """Note a fault; of those with the same `once` (or text), the first."""
        if (key := (code, once or what)) not in self._seen and len(self.faults) < MOST:
            self._seen.add(key)
            self.faults.append(Fault(code, what, where or self.at, self.rank))

    def stop(self, code: str, what: str, where: str = "") -> Stop:
        """The same, for a walk that cannot go on."""
        self.add(code, what, where)
        return Stop()

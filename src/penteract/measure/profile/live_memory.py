"""Living allocations with their owners, and the moment at which they are most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penteract.measure.schemas.profile import LiveRegisters

KEPT = "kept by torch"  # alive between steps, of no owner that is known: small tensors, workspaces of libraries
_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was alive at once: bytes by owner, of registers also by the call that made them, and the call
    under way."""

    bytes: int = 0
    at: str = ""
    owners: dict[str, int] = field(default_factory=dict[str, int])
    made_by: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # name -> how many, bytes

    def rows(self) -> list[LiveRegisters]:
        """The registers by the call that made them, the largest first."""
        most = sorted(self.made_by.items(), key=lambda item: -item[1][1])[:_MOST_ROWS]
        return [{"name": name, "count": count, "bytes": size} for name, (count, size) in most]


@dataclass(slots=True)
class LiveMemory:
    """Adds and removes allocations, and remembers the peak."""

    now: int = 0
    alive: dict[int, tuple[int, str, str]] = field(default_factory=dict[int, tuple[int, str, str]])
    owners: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    sizes: Counter[str] = field(default_factory=Counter[str])
    peak: Peak = field(default_factory=Peak)

    def add(self, key: int, size: int, owner: str, name: str) -> None:
        """An allocation of an owner, in a call."""
        self.alive[key] = size, owner, name
        self._count(size, owner, name, 1)
        if self.now > self.peak.bytes:
            made = {call: (self.counts[call], n) for call, n in self.sizes.items() if n}
            self.peak = Peak(self.now, name, {o: n for o, n in self.owners.items() if n}, made)

    def remove(self, key: int) -> None:
        """It is freed; one that was never added is ignored."""
        if (found := self.alive.pop(key, None)) is not None:
            self._count(-found[0], *found[1:], -1)

    def _count(self, size: int, owner: str, name: str, one: int) -> None:
        self.now += size
        self.owners[owner] += size
        if owner == "activations":
            self.counts[name] += one
            self.sizes[name] += size

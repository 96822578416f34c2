"""Bytes by owner, counted where storages are made: whatever passes torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from penteract.engine.device.storages import Storages

HOST = "host"  # the owner of what is on the host: it counts neither now nor at the peak
REST = "bookkeeping"  # of what nobody claims: counts, scalars, lists of indices
ROUTED = "routed"  # the owner of registers whose size routing decides
WORKSPACE = "workspace"  # of what a call makes and frees


class Moment(NamedTuple):
    """One point of the timeline: after `what`, `now` bytes are alive; since the point before, `most` were.
    `host`: bytes alive there."""

    what: str
    now: int
    most: int
    host: int


class Ledger(Storages):
    """`now`, `peak`: bytes of the device. `at_peak`: who owned them; `owned`: who owns what now; `largest`: the most
    of each owner at any time; `timeline`: what `mark` noted."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = REST
        self.owner_of: dict[int, str] = {}
        self.owned = Counter[str]()
        self.largest = Counter[str]()
        self.at_peak: Mapping[str, int] = {}
        self.timeline: list[Moment] = []
        self.allocations = Counter[tuple[str, int]]()  # how many storages an owner was given, by their bytes
        self.high = 0  # the most since `mark` or `watch`
        self._most = 0

    @contextmanager
    def under(self, owner: str) -> Generator[None]:
        """What is made inside belongs to `owner`."""
        self.owner, before = owner, self.owner
        try:
            yield
        finally:
            self.owner = before

    def label(self, tensors: Iterable[torch.Tensor], owner: str) -> None:
        """The storages of these tensors belong to `owner` from now on."""
        for x in tensors:
            key = self.number(x)
            if key is not None and self.owner_of[key] != owner:
                self._moved(key, owner)

    def relabel_new(self, since: int, owner: str) -> None:
        """What was made after `since` (of `made`), and is still there, belongs to `owner`."""
        for key in [k for k in self.sizes if k > since]:
            self._moved(key, owner)

    def _moved(self, key: int, owner: str) -> None:
        before, size = self.owner_of[key], self.sizes[key]
        self.allocations[before, size] -= 1
        self.allocations[owner, size] += 1
        self.owner_of[key] = owner
        self._add(before, -size)
        self._add(owner, size)

    @property
    def made(self) -> int:
        """How many storages have been made."""
        return self._next

    def settle(self) -> None:
        """Forget the peak so far: it is found anew."""
        self.peak, self.at_peak, self.high, self._most = self.now, dict(self.owned), self.now, self.now
        self.largest = Counter(self.owned)
        self.timeline.clear()

    def pass_by(self, extra: int) -> None:
        """A call that is known makes and frees `extra` bytes."""
        if extra:
            self._add(WORKSPACE, extra)
            self._add(WORKSPACE, -extra)

    def watch(self) -> int:
        """The bytes alive now, from which `high` is counted again."""
        self._most = max(self._most, self.high)
        self.high = self.now
        return self.now

    def mark(self, what: str) -> None:
        """Note a point of the timeline."""
        self.timeline.append(Moment(what, self.now, max(self._most, self.high), self.owned[HOST]))
        self.high = self._most = self.now

    def _track(self, key: int, storage: Any) -> None:
        size = storage.nbytes()
        owner = HOST if storage.device.type == "cpu" else self.owner  # what has numbers is the host's
        self.sizes[key], self.owner_of[key] = size, owner
        self._add(owner, size)
        self.allocations[owner, size] += 1

    def _freed(self, key: int) -> None:
        self._add(self.owner_of.pop(key), -self.sizes.pop(key))

    def _add(self, owner: str, size: int) -> None:
        self.owned[owner] += size
        self.largest[owner] = max(self.largest[owner], self.owned[owner])
        if owner == HOST:
            return
        self.now += size
        self.high = max(self.high, self.now)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.owned)

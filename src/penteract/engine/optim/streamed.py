"""What the optimizer keeps on the host, through the device for the update: a slice comes, one is moved, one leaves.

A slice has a bounded number of elements, so however large a bucket is, three of them are on the device at most. Each
element is moved by itself, hence slices change no bit of an update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.precision.policy import BLOCK
from penteract.engine.comm.comm import Comm, Work
from penteract.engine.executor.device import Device
from penteract.engine.executor.state import Buffers, Flat


class Guest(NamedTuple):
    """A slice on the device: `flat` is of it alone. `there`: the same buffers on the host."""

    owner: Flat
    flat: Flat
    here: Buffers
    there: Buffers


@dataclass(slots=True)
class Streamed:
    """`slices(flat)` are flats whose buffers are on the device, for an optimizer to move in buffer, one after another.

    flats    in the order in which they are moved: all of them, once a step, and then `settle`
    staging  on the device, that slices take in turns: three, or as many as there are slices; narrow moments take a part
    """

    flats: Sequence[Flat]
    staging: Sequence[Buffers]
    device: Device
    comm: Comm
    ahead: Iterator[tuple[int, Flat, slice]] | None = None
    coming: deque[tuple[Guest, list[Work]]] = field(default_factory=deque[tuple[Guest, list[Work]]])
    leaving: deque[list[Work]] = field(default_factory=deque[list[Work]])

    def slices(self, flat: Flat) -> Iterator[Flat]:
        """Those of one flat. The one that follows, of the next flat too, is on its way while one is moved; what has
        been moved is sent back when the next is asked for."""
        if self.ahead is None:
            self.ahead = self._all()
            self._fetch()
        for _ in self._cut(flat):
            guest, works = self.coming.popleft()
            assert guest.owner is flat, "flats are moved in another order than was told"
            self._fetch()
            self._finish(works)
            yield guest.flat
            self.leaving.append([self.device.copy(x, guest.there[name]) for name, x in guest.here.items()])

    def settle(self) -> None:
        """The stream that computes waits until all is back."""
        while self.leaving:
            self._finish(self.leaving.popleft())
        self.ahead = None

    def _all(self) -> Iterator[tuple[int, Flat, slice]]:
        """Every slice of a step, and its staging buffer."""
        every = ((flat, part) for flat in self.flats for part in self._cut(flat))
        return ((i % len(self.staging), flat, part) for i, (flat, part) in enumerate(every))

    def _cut(self, flat: Flat) -> Iterator[slice]:
        whole, size = len(flat.master), len(self.staging[0]["mean"])
        return (slice(at, min(at + size, whole)) for at in range(0, whole, size))

    def _fetch(self) -> None:
        """Begin to bring the next slice, once the one before it in its staging buffer has left."""
        assert self.ahead is not None
        if (item := next(self.ahead, None)) is None:
            return
        buffer, owner, part = item
        if len(self.leaving) == len(self.staging) - 1 > 0:
            self._finish(self.leaving.popleft())
        there = {name: _part(name, x, part) for name, x in owner.apart.items()}
        here = {name: self.staging[buffer][name].view(x.dtype)[: len(x)] for name, x in there.items()}
        works = [self.device.copy(x, here[name]) for name, x in there.items()]
        self.coming.append((Guest(owner, owner.part(part, here), here, there), works))

    def _finish(self, works: list[Work]) -> None:
        for work in works:
            self.comm.finish(work)


def _part(name: str, x: torch.Tensor, part: slice) -> torch.Tensor:
    """Elements of a buffer; of scales, those of their blocks."""
    return x[part.start // BLOCK : part.stop // BLOCK] if name.endswith("/scales") else x[part]

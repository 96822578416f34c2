"""Optimizer state on the host passes through the device for the update: one slice is loaded, one updated, one stored.

A slice has a bounded number of elements, and at most three slices are on the device, however large a bucket is.
Elements are updated independently, so slicing changes no bit of an update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.engine.comm.comm import Comm, Work
from penteract.engine.device.device import Device
from penteract.engine.state.state import Buffers, Flat
from penteract.step.update import parts


class LoadedSlice(NamedTuple):
    """A slice on the device: `flat` has only its elements; `on_device` and `on_host` are its buffers on either side."""

    owner: Flat
    flat: Flat
    on_device: Buffers
    on_host: Buffers


@dataclass(slots=True)
class StreamedState:
    """`slices(flat)` yields flats whose buffers are on the device. The optimizer updates them in place, one after
    another.

    flats    in update order: every step updates all of them once, then calls `settle`
    staging  buffers on the device that slices use in turn: three, or as many as there are slices; narrow moments use a
             part of theirs
    """

    flats: Sequence[Flat]
    staging: Sequence[Buffers]
    device: Device
    comm: Comm
    remaining: Iterator[tuple[int, Flat, slice]] | None = None
    loading: deque[tuple[LoadedSlice, list[Work]]] = field(default_factory=deque[tuple[LoadedSlice, list[Work]]])
    storing: deque[list[Work]] = field(default_factory=deque[list[Work]])

    def slices(self, flat: Flat) -> Iterator[Flat]:
        """The slices of one flat. While one is updated, the next is loaded, also that of the next flat. When the next
        is requested, the updated one is copied back."""
        if self.remaining is None:
            self.remaining = self._all()
            self._fetch()
        for _ in self._parts(flat):
            loaded, works = self.loading.popleft()
            assert loaded.owner is flat, "flats are updated in another order than `flats`"
            self._fetch()
            self._finish(works)
            yield loaded.flat
            self.storing.append([self.device.copy(x, loaded.on_host[name]) for name, x in loaded.on_device.items()])

    def settle(self) -> None:
        """Make the compute stream wait until all slices are stored on the host."""
        while self.storing:
            self._finish(self.storing.popleft())
        self.remaining = None

    def _all(self) -> Iterator[tuple[int, Flat, slice]]:
        """All slices of a step: (number of the staging buffer, flat, part)."""
        every = ((flat, part) for flat in self.flats for part in self._parts(flat))
        return ((i % len(self.staging), flat, part) for i, (flat, part) in enumerate(every))

    def _parts(self, flat: Flat) -> Iterator[slice]:
        return parts(len(flat.master), len(self.staging[0]["mean"]))

    def _fetch(self) -> None:
        """Start to load the next slice, once the previous one in its staging buffer is stored."""
        assert self.remaining is not None
        if (item := next(self.remaining, None)) is None:
            return
        buffer, owner, part = item
        if len(self.storing) == len(self.staging) - 1 > 0:
            self._finish(self.storing.popleft())
        on_host = {name: _part(name, x, part) for name, x in owner.optimizer_state.items()}
        on_device = {name: self.staging[buffer][name].view(x.dtype)[: len(x)] for name, x in on_host.items()}
        works = [self.device.copy(x, on_device[name]) for name, x in on_host.items()]
        self.loading.append((LoadedSlice(owner, owner.part(part, on_device), on_device, on_host), works))

    def _finish(self, works: list[Work]) -> None:
        for work in works:
            self.comm.finish(work)


def _part(name: str, x: torch.Tensor, part: slice) -> torch.Tensor:
    """The given elements of a buffer; for scales, those of the elements' blocks."""
    return x[part.start // MOMENT_BLOCK : part.stop // MOMENT_BLOCK] if name.endswith("/scales") else x[part]

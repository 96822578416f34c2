"""The time of operations between ranks, alone and beside products. All ranks call a method at once, after a barrier.

On a GPU, products run first on every rank: they keep it hot, and give the host time to launch all that is timed, so
that the device's own time is measured. One operation comes before the first event: there, ranks wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import torch

from penteract.measure.calibrate.hot_clock import HotClock, Op
from penteract.measure.calibrate.links.link_operations import LinkOperation

REPEATS = 10  # operations, or products, that are timed together
_LONGER = 2.0  # times as long as what is timed: what runs beside it
_MOST_EXTRA = 200
_SIDE = 512  # of a CPU's products
_MATRIX = 8192  # of a GPU's; `HotClock` heats with the same


class LinkClock(Protocol):
    """Microseconds of one operation or of one product."""

    def alone(self, op: LinkOperation) -> float:
        """Operations one after the other."""
        ...

    def product(self) -> float:
        """Products without any communication."""
        ...

    def under_product(self, op: LinkOperation, alone: float, product: float) -> float:
        """Operations while products run. `alone`, `product`: what each takes without the other."""
        ...

    def contended(self, op: LinkOperation, alone: float, product: float) -> float:
        """Products while operations run. `alone`, `product`: what each takes without the other."""
        ...

    def settle(self) -> None:
        """Wait until the device has done everything."""
        ...


def link_clock(device: torch.device) -> LinkClock:
    """The clock of a kind of device."""
    return GpuLinkClock(HotClock(device)) if device.type == "cuda" else CpuLinkClock()


@dataclass(slots=True)
class GpuLinkClock:
    """By the device's own events. `hot`: heats, by the products that are timed."""

    hot: HotClock
    _side: torch.cuda.Stream | None = field(default=None, init=False)

    def alone(self, op: LinkOperation) -> float:
        """By events around REPEATS operations."""
        self.hot.heat()
        op()
        begin, end = _event(), _event()
        begin.record()
        for _ in range(REPEATS):
            op()
        end.record()
        return _between(begin, end)

    def product(self) -> float:
        """By events around REPEATS products."""
        multiply = self.hot.filler
        self.hot.heat()
        begin, end = _event(), _event()
        begin.record()
        for _ in range(REPEATS):
            multiply()
        end.record()
        return _between(begin, end)

    def under_product(self, op: LinkOperation, alone: float, product: float) -> float:
        """The second event follows the operations on a side stream."""
        multiply, extra = self.hot.filler, _extra(alone, product)
        self.hot.heat()
        op()
        begin, end = _event(), _event()
        begin.record()
        started = [op.start() for _ in range(REPEATS)]
        for _ in range(extra):
            multiply()
        if self._side is None:
            self._side = torch.cuda.Stream()
        with torch.cuda.stream(self._side):  # it waits for the operations alone
            for work in started:
                op.finish(work)
            end.record()
        self.settle()
        return _between(begin, end)

    def contended(self, op: LinkOperation, alone: float, product: float) -> float:
        """The second event follows the products."""
        multiply, extra = self.hot.filler, _extra(product, alone)
        self.hot.heat()
        op()
        begin, end = _event(), _event()
        begin.record()
        started = [op.start() for _ in range(extra)]
        for _ in range(REPEATS):
            multiply()
        end.record()
        for work in started:
            op.finish(work)
        self.settle()
        return _between(begin, end)

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


def _extra(timed: float, other: float) -> int:
    """How many of what takes `other` run beside REPEATS of what takes `timed`, so that they end later. The same number
    on all ranks, as the times are."""
    return min(_MOST_EXTRA, max(REPEATS, ceil(_LONGER * REPEATS * timed / other)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / REPEATS


@dataclass(slots=True)
class CpuLinkClock:
    """By the host's clock. Products run in a thread beside the operations; torch lets go of the interpreter in both."""

    _multiply: Op | None = field(default=None, init=False)

    def alone(self, op: LinkOperation) -> float:
        """REPEATS operations."""
        return _microseconds(op)

    def product(self) -> float:
        """REPEATS products."""
        return _microseconds(self._product())

    def under_product(self, op: LinkOperation, alone: float, product: float) -> float:
        """REPEATS operations beside a thread's products."""
        return self._together(op)[0]

    def contended(self, op: LinkOperation, alone: float, product: float) -> float:
        """A thread's products beside REPEATS operations."""
        return self._together(op)[1]

    def settle(self) -> None:
        """Nothing is under way."""

    def _together(self, op: Callable[[], None]) -> tuple[float, float]:
        """Microseconds of an operation and of a product, where each runs beside the other."""
        multiply, over, took = self._product(), threading.Event(), list[float]()

        def multiply_on() -> None:
            while not took or not over.is_set():
                begun = time.perf_counter()
                multiply()
                took.append(time.perf_counter() - begun)

        thread = threading.Thread(target=multiply_on, name="products", daemon=True)
        thread.start()
        try:
            found = _microseconds(op)
        finally:
            over.set()
            thread.join()
        return found, 1e6 * sum(took) / len(took)

    def _product(self) -> Op:
        if self._multiply is None:
            a, b, out = (torch.randn(_SIDE, _SIDE) for _ in range(3))
            self._multiply = lambda: torch.mm(a, b, out=out)
        return self._multiply


def _microseconds(op: Op) -> float:
    op()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        op()
    return 1e6 * (time.perf_counter() - begun) / REPEATS

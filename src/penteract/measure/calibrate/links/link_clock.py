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
_MATRIX = 4096  # of a GPU's
_INSIDE = 0.7  # of a long operation that products beside it take


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
    if device.type != "cuda":
        return CpuLinkClock()
    a, b, out = (torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16) for _ in range(3))
    return GpuLinkClock(HotClock(device), lambda: torch.mm(a, b, out=out))


@dataclass(slots=True)
class GpuLinkClock:
    """By the device's own events. `hot`: heats. `multiply`: the product that runs beside, as short as those of a layer:
    a collective waits for the end of the product that has all of the device."""

    hot: HotClock
    multiply: Op
    _side: torch.cuda.Stream | None = field(default=None, init=False)

    def alone(self, op: LinkOperation) -> float:
        """By events around REPEATS operations."""
        self.hot.heat()
        op()
        return _timed(op, REPEATS)

    def product(self) -> float:
        """By events around REPEATS products."""
        self.hot.heat()
        return _timed(self.multiply, REPEATS)

    def under_product(self, op: LinkOperation, alone: float, product: float) -> float:
        """The second event follows the operations on a side stream."""
        extra = min(_MOST_EXTRA, max(REPEATS, ceil(_LONGER * REPEATS * alone / product)))
        self.hot.heat()
        op()
        begin, end = _event(), _event()
        begin.record()
        started = [op.start() for _ in range(REPEATS)]
        for _ in range(extra):
            self.multiply()
        if self._side is None:
            self._side = torch.cuda.Stream()
        with torch.cuda.stream(self._side):  # it waits for the operations alone
            for work in started:
                op.finish(work)
            end.record()
        self.settle()
        return _between(begin, end) / REPEATS

    def contended(self, op: LinkOperation, alone: float, product: float) -> float:
        """Products within one long operation that began before them, over as many without it, in turn: so both have the
        same clock. Queued operations would wait for products, and few would run beside them."""
        self.hot.heat()
        op()
        count = max(1, int(_INSIDE * _timed(op, 1) / product))
        self.hot.heat()
        free = _timed(self.multiply, count)
        self.hot.heat()
        op()
        begin, end = _event(), _event()
        begin.record()
        work = op.start()
        for _ in range(count):
            self.multiply()
        end.record()
        op.finish(work)
        self.settle()
        return product * _between(begin, end) / count / free

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


def _timed(op: Op, times: int) -> float:
    """Microseconds of one of `times` operations on the device."""
    begin, end = _event(), _event()
    begin.record()
    for _ in range(times):
        op()
    end.record()
    return _between(begin, end) / times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


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

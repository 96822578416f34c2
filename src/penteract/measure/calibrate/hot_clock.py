"""The time of operations on a hot device.

In a training step, power limits the clock of a GPU, so bursts are faster than any step: large products run for 600 ms
and for about 20 ms before each round of the operation that is timed. The device idles neither between rounds nor, for
long, between operations: its clock follows what it has drawn in the last seconds. Attention may take most of a step and
needs less power than products, so that the clock is higher there: it is timed between the products of its layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch

Op = Callable[[], Any]
ROUNDS, FILL_MS, REPEAT_MS, MOST_REPEATS = 5, 20.0, 8.0, 20
WARM_MS, TIMED_MS, FILLER_FLOPS = 600.0, 200.0, 2 * 8192**3
CPU_SECONDS, CPU_MOST = 0.05, 50  # of one operation, once it is warm
CALLS = 200  # of a kernel whose launch is timed


@dataclass(slots=True)
class HotClock:
    """Microseconds of operations on `device`: medians over rounds."""

    device: torch.device
    _filler: Op | None = field(default=None, init=False)
    _filler_ms: float = field(default=0.0, init=False)

    def microseconds(self, op: Op) -> float:
        """Of one operation, after warming up."""
        op()
        if self.device.type != "cuda":
            return _on_cpu(op)
        op()
        torch.cuda.synchronize()
        times = max(1, min(MOST_REPEATS, round(REPEAT_MS / max(_events(op, 2), 1e-3))))
        self.heat(WARM_MS)
        marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        for _ in range(ROUNDS):
            self.heat()
            marks.append(_marked(op, times))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(begin.elapsed_time(end) / times for begin, end in marks)

    def microseconds_in_layer(self, op: Op, around: float) -> float:
        """Of one operation between products of `around` FLOPs, once the clock has settled."""
        op()
        if self.device.type != "cuda":
            return _on_cpu(op)
        op()
        torch.cuda.synchronize()
        calls = min(MOST_REPEATS, ceil(FILLER_FLOPS / around))
        products = max(1, round(calls * around / FILLER_FLOPS))
        each = _events(op, 2) * calls + _events(self.filler, 2) * products
        warm, timed = (max(3, ceil(ms / each)) for ms in (WARM_MS, TIMED_MS))
        marks = list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        for _ in range(warm + timed):
            for _ in range(products):
                self.filler()
            marks.append(_marked(op, calls))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(begin.elapsed_time(end) / calls for begin, end in marks[warm:])

    def launch_microseconds(self, op: Op) -> float:
        """What the host needs to launch a small operation, while the device keeps up."""
        op()
        found = list[float]()
        for _ in range(ROUNDS):
            self.settle()
            begun = time.perf_counter()
            for _ in range(CALLS):
                op()
            found.append((time.perf_counter() - begun) / CALLS * 1e6)
        self.settle()
        return statistics.median(found)

    def settle(self) -> None:
        """Wait until the device has computed everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def filler(self) -> Op:
        """The product of bf16 matrices of 8192 by 8192 that heats: `FILLER_FLOPS`."""
        return self._filler or self._heater()

    def heat(self, milliseconds: float = FILL_MS) -> None:
        """About so long of large products on the device. The host goes on."""
        filler = self.filler
        for _ in range(max(1, round(milliseconds / self._filler_ms))):
            filler()

    def _heater(self) -> Op:
        a, b, out = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(3))

        def heat() -> None:
            torch.mm(a, b, out=out)

        heat()
        self._filler_ms = _events(heat, 10)
        self._filler = heat
        return heat


def _events(op: Op, times: int) -> float:
    """Milliseconds of one of `times` operations, by the device's own clock."""
    begin, end = _marked(op, times)
    end.synchronize()
    return begin.elapsed_time(end) / times


def _marked(op: Op, times: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events of the device before `times` operations and after them. The host goes on."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        op()
    end.record()
    return begin, end


def _on_cpu(op: Op) -> float:
    found, end = list[float](), time.perf_counter() + CPU_SECONDS
    while len(found) < 3 or (time.perf_counter() < end and len(found) < CPU_MOST):
        begun = time.perf_counter()
        op()
        found.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(found)

"""When a device reaches the ends of steps. A host that runs ahead of a GPU sees them late, and the last too soon."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from penteract.units import Seconds


class StepEnds:
    """Moments of one device: CUDA events on the stream that computes, or the host's clock where the host computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """The device is here once it has done all that was asked of it."""
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)

    def seconds(self) -> list[Seconds]:
        """From each mark to the next. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [self._between(before, after) for before, after in pairwise(self._marks)]

    @staticmethod
    def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> Seconds:
        if isinstance(before, float) and isinstance(after, float):
            return after - before
        assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) / 1e3

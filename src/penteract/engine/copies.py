"""Copies between the device and the host, beside compute: `start` puts one on its stream, `finish` of `Comm` waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penteract.engine.comm.comm import Flight


@dataclass(frozen=True, slots=True)
class Landing:
    """A copy under way. `wait` lets the stream that computes wait; the host does not."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@dataclass(slots=True)
class Copies:
    """A stream a direction, as a GPU has an engine for each. On a CPU a copy is done when it is started.

    A copy begins after all that is computed so far, so that what it reads is there and what it writes over is read.
    """

    device: torch.device
    streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict[torch.device, torch.cuda.Stream])

    def start(self, x: torch.Tensor, y: torch.Tensor) -> Flight:
        """Begin to copy x to y, of the same shape and dtype; both are pinned until it is waited for."""
        if self.device.type != "cuda":
            y.copy_(x)
            return Flight([], (x, y))
        if y.device not in self.streams:
            self.streams[y.device] = torch.cuda.Stream(self.device)
        stream = self.streams[y.device]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return Flight([Landing(event)], (x, y))

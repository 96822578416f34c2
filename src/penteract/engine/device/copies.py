"""Copies under way between the device and the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class CopyOut(Protocol):
    """Copies from the device to the host under way."""

    def wait(self) -> None:
        """Let what is computed from now on begin after them. The host does not wait."""
        ...

    def arrived(self) -> bool:
        """Whether the host may read them."""
        ...

    def settle(self) -> None:
        """Block the host until it may."""
        ...


class Copied:
    """Copies that were done at once."""

    def wait(self) -> None:
        """Nothing is under way."""

    def arrived(self) -> bool:
        """They are there."""
        return True

    def settle(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """A copy under way. `wait` makes the current stream wait, not the host."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self.event)

    def arrived(self) -> bool:
        """Whether the device has made it."""
        return self.event.query()

    def settle(self) -> None:
        """Block the host until the device has made it."""
        self.event.synchronize()

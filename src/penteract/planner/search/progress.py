"""The progress of a search while it runs, and the exception of one that was stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from penteract.units import Seconds

if TYPE_CHECKING:
    from penteract.planner.plan import Plan
    from penteract.planner.search.best import Timed

EVERY = 0.1  # seconds between two reports


@dataclass(frozen=True, slots=True)
class Progress:
    """How many layouts are priced, how many are left, and the best so far.

    Most of those left are never priced: their bound is above the best.
    """

    seconds: Seconds
    priced: int
    left: int
    best: Timed | None


Watch = Callable[[Progress], None]


@dataclass(slots=True)
class Pulse:
    """Reports the progress of a search to `watch`, every so often. The search calls it in each iteration."""

    watch: Watch | None = None
    progress: Callable[[Seconds], Progress] | None = None
    clock: Callable[[], float] = perf_counter
    every: Seconds = EVERY
    _began: float = field(init=False)
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock, if there is a watcher."""
        self._began = self.clock() if self.watch else 0.0
        self._next = self._began + self.every

    def __call__(self) -> None:
        """Report to the watcher, if `every` seconds have passed since the last report."""
        if self.watch is None or self.progress is None:
            return
        now = self.clock()
        if now >= self._next:
            self._next = now + self.every
            self.watch(self.progress(now - self._began))


class Stopped(KeyboardInterrupt):
    """A search was stopped. `plan`: what it had found."""

    def __init__(self, plan: Plan) -> None:
        """`plan`: the best layouts until now."""
        self.plan = plan
        super().__init__("the search was stopped: `plan` has the best so far")

"""How far a search is, told while it goes on; and what is left of one that was stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from penteract.units import Seconds

if TYPE_CHECKING:
    from penteract.planner.plan import Plan
    from penteract.planner.search.best import Timed

EVERY = 0.1  # seconds between two tellings


@dataclass(frozen=True, slots=True)
class Progress:
    """Layouts that are priced, and those of which nothing but a bound of their time is known; and the best so far.

    Most of those that are left are never priced: their bound lies above the best.
    """

    seconds: Seconds
    priced: int
    left: int
    best: Timed | None


Watch = Callable[[Progress], None]


@dataclass(slots=True)
class Pulse:
    """Tells `watch` of a search every so often. Whoever searches calls it at each turn."""

    watch: Watch | None = None
    tell: Callable[[Seconds], Progress] | None = None
    clock: Callable[[], float] = perf_counter
    every: Seconds = EVERY
    _began: float = field(init=False)
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock where somebody watches."""
        self._began = self.clock() if self.watch else 0.0
        self._next = self._began + self.every

    def __call__(self) -> None:
        """Tell the watcher of the search, if `every` seconds have passed since it was told last."""
        if self.watch is None or self.tell is None:
            return
        now = self.clock()
        if now >= self._next:
            self._next = now + self.every
            self.watch(self.tell(now - self._began))


class Stopped(KeyboardInterrupt):
    """A search was stopped. `plan`: what it had found."""

    def __init__(self, plan: Plan) -> None:
        """`plan`: the best layouts until now."""
        self.plan = plan
        super().__init__("the search was stopped: `plan` has the best so far")

"""How far a rank's main thread is. It notes it here; the watching thread reads it, and tells the other ranks."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from penteract.config.run import Limits
from penteract.engine.comm.journal import Journal

PhaseName = Literal["join", "data", "compile", "load", "step", "validate", "save", "done"]
_T = TypeVar("_T")
_PASS_ON = frozenset({"comm", "rank.py", "rank_progress.py"})  # their lines only pass a wait on
_TIMED, _LEAST = 64, 8  # steps that are timed, and before their median counts
_STEPS = 30.0  # a rank without progress for so many steps hangs
_SHARE = 0.2  # of the limit: a short step may wait for its machine
_PACKAGE = str(Path(__file__).parents[3])


@dataclass(slots=True)
class RankProgress:
    """`phase`, and the one whose limit holds. `step`: from 1; 0: before the first. `action`: the last that the host has
    finished. `step_times`: seconds from the beginning of a step to that of the next, of the last steps."""

    limits: Limits = field(default_factory=Limits)
    journal: Journal = field(default_factory=Journal)
    phase: PhaseName = "join"
    limited_by: PhaseName = "join"
    step: int = 0
    action: str = ""
    ticks: int = 0
    step_times: deque[float] = field(default_factory=lambda: deque[float](maxlen=_TIMED))
    _began: float = 0.0  # when this step did; 0: not known, or it is the first

    @property
    def limit(self) -> float:
        """Seconds that the main thread may spend without progress."""
        return self.limits.of(self.limited_by)

    @property
    def median_step(self) -> float | None:
        """Seconds that a step takes; None until enough have been timed."""
        return median(self.step_times) if len(self.step_times) >= _LEAST else None

    def bound(self, *, alone: bool) -> float:
        """Seconds without progress after which this rank's own watch ends the run; `inf`: it does not.

        In a step that of many steps, between a share of the limit and the limit, so that a larger limit waits longer.
        In other phases the limit, where no other rank watches this one (`alone`); not while data are prepared, which
        may take as long as it takes.
        """
        usual = self.median_step
        if self.phase == "step" and self.limited_by == "step" and usual is not None:
            return min(self.limit, max(_SHARE * self.limit, _STEPS * usual))
        return self.limit if alone and self.limited_by not in ("join", "data") else inf

    def enter(self, phase: PhaseName, limited_by: PhaseName | None = None) -> None:
        """Go on to a phase. `limited_by`: the phase whose limit holds, if it is another."""
        self.limited_by = limited_by or phase
        self.phase = phase
        self.ticks += 1

    @contextmanager
    def during(self, phase: PhaseName, limited_by: PhaseName | None = None) -> Iterator[None]:
        """A phase within another. One that fails stays the present one, so that it is named."""
        before = self.phase, self.limited_by
        self.enter(phase, limited_by)
        yield
        self.enter(*before)

    def reading(self, read: Callable[[], _T]) -> _T:
        """Read data in the middle of another phase, whose limit goes on."""
        with self.during("data", self.limited_by):
            return read()

    def begin_step(self, number: int, *, first: bool = False) -> None:
        """Step `number` begins. In the first of a process kernels are compiled, so the limit of that phase holds."""
        now = time.monotonic()
        if self._began and number == self.step + 1:
            self.step_times.append(now - self._began)
        self._began = 0.0 if first else now
        self.step, self.action = number, ""
        self.enter("step", "compile" if first else None)

    def did(self, action: str) -> None:
        """An action is done on the host; a GPU may still be at it."""
        self.action = action
        self.ticks += 1
        if self.journal.marks is not None:
            self.journal.marks.add(action)

    def over(self, items: Iterable[_T]) -> Iterator[_T]:
        """The items. Each one is progress."""
        for item in items:
            self.ticks += 1
            yield item


def main_thread_at() -> str:
    """Where the main thread is: the innermost line of this package, as `session/trainer.py:112 in start`. Lines that
    only pass a wait on are left out."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        parts = Path(code.co_filename).parts[-2:]
        if code.co_filename.startswith(_PACKAGE) and _PASS_ON.isdisjoint(parts):
            return f"{'/'.join(parts)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""

"""Steps whose copies of tokens may not fit the blocks in which ranks send them to their experts.

Such a step changes nothing: the device notes it in the norm of the gradient, which all ranks sum, and the latch keeps
the steps behind it from changing anything, too. When the host reads the outcome, all ranks walk the step again, with
exact sizes and the batch that they have. The steps that follow have exact sizes, too: one the first time, twice as many
each time that copies do not fit again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from penteract.engine.data import Samples
from penteract.engine.executor.batch_loader import BatchLoader, HostBatch
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.outcome import Outcome

Reading = Callable[[], Outcome]  # waits for a step's outcome
MOST = 64  # steps with exact sizes, after one that was repeated


class Walker(Protocol):
    """A trainer, as far as it is needed here."""

    loader: BatchLoader

    def ask(
        self, number: int, samples: Samples, first: int, exact: Executor | None = None, again: HostBatch | None = None
    ) -> Reading:
        """Ask the device for a step, by `exact` with exact sizes; `again`: the batch of a step that is repeated."""
        ...


@dataclass(slots=True)
class AskedStep:
    """A step that the device was asked for.

    exact  with exact sizes
    void   known to have changed nothing, as one before it did not fit
    """

    number: int
    samples: Samples
    first: int
    batch: HostBatch | None
    exact: bool
    read: Reading
    void: bool = False
    outcome: Outcome | None = None


@dataclass(slots=True)
class RepeatedSteps:
    """`start` asks for a step in blocks, or with exact sizes where copies did not fit lately.

    exact        walks steps with exact sizes, on the state and with the numbers of the run
    warn         says which step was repeated, and how many after it have exact sizes
    exact_steps  the numbers of steps that had exact sizes, so far
    """

    exact: Executor
    warn: Callable[[int, int], None]
    last: AskedStep | None = None
    exact_until: int = 0  # the last step that has exact sizes without being asked for in blocks
    more: int = 0  # how many steps had them after the last that did not fit
    exact_steps: set[int] = field(default_factory=set[int])

    def start(self, by: Walker, number: int, samples: Samples, first: int) -> Reading:
        """As `Trainer.start`."""
        if self.last is not None and self.last.void:
            self._repeat(by, self.last, stop=self.last.read().stop)
        exact = self.exact if number <= self.exact_until else None
        read = by.ask(number, samples, first, exact)
        if exact is not None:
            self.exact_steps.add(number)
        self.last = AskedStep(number, samples, first, by.loader.last, exact is not None, read)
        return partial(self._outcome, by, self.last)

    def _outcome(self, by: Walker, asked: AskedStep) -> Outcome:
        if asked.outcome is not None:
            return asked.outcome
        found = asked.read()
        if asked.void:
            return self._repeat(by, asked, stop=found.stop)
        if not found.finite and not asked.exact:
            return self._did_not_fit(by, asked, stop=found.stop)
        if not asked.exact and asked.number > self.exact_until + self.more:
            self.more = 0
        asked.outcome = found
        return found

    def _did_not_fit(self, by: Walker, asked: AskedStep, *, stop: bool) -> Outcome:
        """Repeat a step that was not finite: if that was not for its blocks, it is not finite again."""
        assert self.last is not None, "an outcome without a step"
        self.last.void = self.last is not asked
        self.more = min(2 * self.more or 1, MOST)
        self.exact_until = self.last.number + self.more
        self.exact.latch.zero_()
        found = self._repeat(by, asked, stop=stop)
        if found.finite:
            self.warn(asked.number, self.more)
        return found

    def _repeat(self, by: Walker, asked: AskedStep, *, stop: bool) -> Outcome:
        """`stop`: whether some rank asked to stop in the step, or could not load the batch behind it."""
        asked.void = False
        of_next, counts = self.exact.stop.clone(), self.exact.counts.clone()
        self.exact.stop.fill_(float(stop))
        read = by.ask(asked.number, asked.samples, asked.first, self.exact, asked.batch)
        self.exact.stop.copy_(of_next)
        self.exact.counts.copy_(counts)  # of the batch that is loaded ahead
        self.exact_steps.add(asked.number)
        asked.outcome = read()
        return asked.outcome

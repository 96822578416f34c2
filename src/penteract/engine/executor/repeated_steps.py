"""Steps whose copies of tokens may not fit the blocks in which ranks send them to their experts.

Such a step changes nothing: the device notes it in the norm of the gradient, which all ranks sum, and the latch keeps
the steps behind it from changing anything, too. When the host reads the outcome, all ranks walk the step again, with
exact sizes. The steps that follow have exact sizes, too: one the first time, twice as many each time that copies do not
fit again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penteract.engine.data import Samples
from penteract.engine.executor.outcome import Outcome

Reading = Callable[[], Outcome]  # waits for a step's outcome
MOST = 64  # steps with exact sizes, after one that was repeated


@dataclass(slots=True)
class AskedStep:
    """A step that the device was asked for.

    exact    with exact sizes
    void     known to have changed nothing, as one before it did not fit
    """

    number: int
    samples: Samples
    first: int
    exact: bool
    read: Reading
    void: bool = False
    outcome: Outcome | None = None


@dataclass(slots=True)
class RepeatedSteps:
    """`start` asks for a step in blocks, or with exact sizes where copies did not fit lately.

    in_blocks, exactly  (number, samples, first) -> what waits for the outcome; `exactly` also takes whether a rank was
                        asked to stop before
    release             lets steps change the state again, after one that did not fit
    tell                says which step was repeated, and how many after it have exact sizes
    """

    in_blocks: Callable[[int, Samples, int], Reading]
    exactly: Callable[[int, Samples, int, bool], Reading]
    release: Callable[[], object]
    tell: Callable[[int, int], None]
    last: AskedStep | None = None
    exact_until: int = 0  # the last step that has exact sizes
    some: int = 0  # steps that had exact sizes after the last that did not fit
    repeated: list[int] = field(default_factory=list[int])  # numbers of steps

    def start(self, number: int, samples: Samples, first: int) -> Reading:
        """As `Trainer.start`."""
        if self.last is not None and self.last.void:
            self._repeat(self.last, stop=False)
        exact = number <= self.exact_until
        read = self.exactly(number, samples, first, False) if exact else self.in_blocks(number, samples, first)
        self.last = AskedStep(number, samples, first, exact, read)
        return partial(self._outcome, self.last)

    def _outcome(self, asked: AskedStep) -> Outcome:
        if asked.outcome is None and asked.void:
            self._repeat(asked, stop=False)
        if asked.outcome is None:
            asked.outcome = asked.read()
            if not asked.outcome.finite and not asked.exact:
                self._did_not_fit(asked, stop=asked.outcome.stop)
            elif not asked.exact and asked.number > self.exact_until + self.some:
                self.some = 0
        return asked.outcome

    def _did_not_fit(self, asked: AskedStep, *, stop: bool) -> None:
        """Repeat a step that was not finite: if that was not for its blocks, it is not finite again."""
        assert self.last is not None, "an outcome without a step"
        self.last.void = self.last is not asked
        self.some = min(2 * self.some or 1, MOST)
        self.exact_until = self.last.number + self.some
        self.release()
        if self._repeat(asked, stop=stop).finite:
            self.tell(asked.number, self.some)

    def _repeat(self, asked: AskedStep, *, stop: bool) -> Outcome:
        asked.void = False
        self.repeated.append(asked.number)
        asked.outcome = self.exactly(asked.number, asked.samples, asked.first, stop)()
        return asked.outcome

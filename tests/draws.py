"""Properties of which `make test` draws few examples, and `make test-all` five times as many or more; and sweeps of
which `make test` has every kind, and `make test-all` all cases (`tests/wide_long.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

USUAL = 100  # examples of a profile that does not say how many
TIMES = 5  # as many, of the profile `wide`


def more(few: int, wide: int = 0) -> int:
    """`few`, or as many times more as today's profile draws more than usual, and then at least `wide`."""
    count = few * settings().max_examples // USUAL
    return max(count, wide) if count > few else count


def draws(few: int, wide: int = 0) -> Callable[[Any], Any]:
    """Examples that hypothesis draws. `wide`: how many of them `make test-all` draws at least."""
    examples = more(few, wide)
    drawn = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: pytest.mark.wide(examples)(drawn(test))


def seeds(few: int, first: int = 0, wide: int = 0) -> Callable[[Any], Any]:
    """Numbers from `first`, each of them a test's `seed`. `wide`: how many of them `make test-all` has at least."""
    count = more(few, wide)
    numbered = pytest.mark.parametrize("seed", range(first, first + count))
    return lambda test: pytest.mark.wide(1)(numbered(test))


def further(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of a parametrised sweep that `make test-all` has beside those of `make test`."""
    wide = settings().max_examples > USUAL
    return [pytest.param(*case, marks=pytest.mark.wide(1)) for case in cases if wide]


def in_turn(cases: Iterable[Any], choices: Sequence[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Each case with the first choice and one of the others in turn, and the first case of each kind with all of them;
    `make test-all` has every case with every choice."""
    few, rest, met = list[tuple[Any, ...]](), list[tuple[Any, ...]](), set[Any]()
    for i, case in enumerate(cases):
        turn = {0, 1 + i % (len(choices) - 1)} if kind(case) in met else range(len(choices))
        met.add(kind(case))
        for j, choice in enumerate(choices):
            (few if j in turn else rest).append((case, choice))
    return [*few, *further(rest)]

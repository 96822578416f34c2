"""Places in one block: nothing that lives at once shares a byte."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from penteract.step.fit import first_fit

LIVES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 64)), max_size=12).map(
    lambda rows: sorted((born, born + long, n) for born, long, n in rows)
)


@given(LIVES)
def test_what_lives_at_once_lies_apart(lives: list[tuple[int, int, int]]):
    size, where = first_fit(lives)
    assert size == max((at + n for (_, _, n), at in zip(lives, where, strict=True)), default=0)
    for ((_, dies, n), a), ((born, _, m), b) in combinations(zip(lives, where, strict=True), 2):
        assert born > dies or a + n <= b or b + m <= a


@given(LIVES)
def test_a_place_is_the_lowest_gap(lives: list[tuple[int, int, int]]):
    _, where = first_fit(lives)
    for k, ((born, _, n), at) in enumerate(zip(lives, where, strict=True)):
        held = [(b, b + m) for (_, dies, m), b in zip(lives[:k], where[:k], strict=True) if dies >= born]
        ends = [0, *(end for _, end in held)]
        assert at == min(e for e in ends if all(e + n <= low or high <= e for low, high in held))


def test_times_may_be_tuples():
    assert first_fit([((0, 1), (0, 2), 8), ((0, 3), (1, 0), 4)]) == (8, [0, 0])

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.engine.data.order import permute


@given(st.integers(1, 400), st.integers(-(2**63), 2**64), st.integers(0, 10**9))
def test_every_window_comes_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, n, seed, epoch) for i in range(n)) == list(range(n))


@given(st.integers(2**31, 2**48), st.data())
def test_large_domains_stay_inside(n: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    assert 0 <= permute(a, n, 1, 0) < n
    assert (permute(a, n, 1, 0) == permute(b, n, 1, 0)) == (a == b)


def test_the_order_is_pinned() -> None:
    """A resumed run reads what the first one would have read: this list must never change."""
    assert [permute(i, 10, 0, 0) for i in range(10)] == [8, 4, 1, 5, 6, 7, 0, 9, 2, 3]


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 1000
    orders = [[permute(i, n, s, e) for i in range(n)] for s in (0, 1) for e in (0, 1)] + [list(range(n))]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10  # 1 is expected of random permutations
            follow = sum(a[k + 1] - a[k] == b[k + 1] - b[k] for k in range(n - 1))
            assert follow < 20


def test_neighbours_are_spread() -> None:
    n = 4096
    order = [permute(i, n, 3, 0) for i in range(n)]
    mean = sum(abs(a - b) for a, b in pairwise(order)) / (n - 1)
    assert abs(mean / (n / 3) - 1) < 0.05  # n/3 is the mean distance of two uniform draws


def test_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        permute(5, 5, 0, 0)

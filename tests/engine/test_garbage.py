"""Garbage is collected between chosen steps, and nowhere else."""

from __future__ import annotations

import gc
import weakref

import pytest

from penteract.engine.session.garbage import EVERY, collect_after, collected_between_steps


class Node:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before():
    assert gc.isenabled() and not gc.get_freeze_count()
    yield
    assert gc.isenabled() and not gc.get_freeze_count()


def test_a_cycle_lives_until_the_next_chosen_step():
    with collected_between_steps():
        found = list[int]()
        for step in range(1, 2 * EVERY + 1):
            left = weakref.ref(Node())
            many = [[i] for i in range(20_000)]  # thousands of objects: enough for an automatic collection
            assert left() is not None and len(many)
            collect_after(step)
            if left() is None:
                found.append(step)
    assert found == [1, 2, EVERY, 2 * EVERY]


def test_what_a_run_keeps_is_not_walked_again():
    with collected_between_steps():
        kept = [Node() for _ in range(10_000)]
        collect_after(1)
        collect_after(2)
        assert gc.get_freeze_count() >= len(kept) > len(gc.get_objects())


def test_an_error_leaves_all_as_before_and_an_inner_use_changes_nothing():
    with pytest.raises(ValueError, match="inner"), collected_between_steps():
        collect_after(2)
        with collected_between_steps():
            pass
        assert not gc.isenabled() and gc.get_freeze_count()
        raise ValueError("inner")

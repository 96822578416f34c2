"""Garbage is collected between chosen steps, and nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from penteract.engine.session.garbage import EVERY, collect_after, collected_between_steps, imports_are_done


class Node:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def own_heap():
    """The whole: these tests look at what is frozen."""
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


def test_a_rank_imports_without_collections_and_collects_from_its_first_line():
    code = (
        "import gc, penteract\n"
        "ended = []\n"
        "gc.callbacks.append(lambda phase, info: ended.append(phase))\n"
        "import penteract.engine.runtime.worker\n"
        "assert not ended and not gc.isenabled()\n"
        "penteract.engine.runtime.worker.imports_are_done()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()\n"
    )
    # The last word is among those that the process was started with, as where it is a module to run.
    words = [sys.executable, "-c", code, "penteract.engine.runtime.worker"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_collecting_was_never_off_nothing_changes():
    imports_are_done()
    assert gc.isenabled() and not gc.get_freeze_count()

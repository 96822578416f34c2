from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from penteract.engine.data.stream.read_ahead import ReadAhead
from penteract.errors import Bug


def counting(stopped: Callable[[], bool]) -> Iterator[int]:
    number = 0
    while not stopped():
        yield number
        number += 1


@pytest.mark.parametrize("depth", [1, 3])
def test_items_come_in_order_and_its_thread_ends(depth: int) -> None:
    ahead = ReadAhead(counting, depth)
    assert [ahead.take() for _ in range(50)] == list(range(50))
    assert ahead.thread.is_alive()
    ahead.close()
    assert not ahead.thread.is_alive()
    ahead.close()


def test_what_is_no_longer_used_is_stopped() -> None:
    ahead = ReadAhead(counting, 2)
    ahead.take()
    gone, thread = weakref.ref(ahead), ahead.thread
    del ahead
    gc.collect()
    thread.join(60)
    assert gone() is None and not thread.is_alive()


def test_an_iterator_that_ends_is_an_error() -> None:
    ahead = ReadAhead(lambda _: iter([1]), 2)
    assert ahead.take() == 1
    with pytest.raises(Bug, match="has ended"):
        ahead.take()


def test_no_more_than_its_depth_is_made() -> None:
    made, enough = list[int](), threading.Event()

    def make(stopped: Callable[[], bool]) -> Iterator[int]:
        for number in counting(stopped):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    ahead = ReadAhead(make, 2)
    assert ahead.take() == 0
    assert enough.wait(60) and not threading.Event().wait(0.05)
    assert made == [0, 1, 2, 3]  # one taken, two ready, one that waits for room
    ahead.close()


def test_an_error_follows_what_was_made_before() -> None:
    def make(_: Callable[[], bool]) -> Iterator[int]:
        yield 7
        raise KeyError("gone")

    ahead = ReadAhead(make, 4)
    assert ahead.take() == 7
    with pytest.raises(KeyError):
        ahead.take()
    assert not ahead.thread.is_alive()

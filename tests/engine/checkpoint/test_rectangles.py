"""A flat range of a row-major tensor is tiled by rectangles in order, by the fewest that are flat ranges themselves."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.shards import Box
from penteract.engine.checkpoint import rectangles


def numbers(shape: tuple[int, ...], box: Box) -> list[int]:
    """The places in the flat tensor of a box's elements."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    places = product(*(range(o, o + n) for o, n in zip(*box, strict=True)))
    return [sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]


@given(shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), data=st.data())
def test_rectangles_tile_exactly_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    boxes = list(rectangles(shape, begin, end))
    assert [i for box in boxes for i in numbers(shape, box)] == list(range(begin, end))
    assert all(prod(size) for _, size in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shape=st.lists(st.integers(1, 3), max_size=3).map(tuple), data=st.data())
def test_there_are_no_fewer(shape: tuple[int, ...], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    assert len(list(rectangles(shape, begin, end))) == fewest(shape, begin, end)


@cache
def fewest(shape: tuple[int, ...], begin: int, end: int) -> int:
    """By trying every rectangle whose first corner is the first element, and which is a flat range."""
    if begin == end:
        return 0
    corner, rest = list[int](), begin
    for d in range(len(shape)):
        at, rest = divmod(rest, prod(shape[d + 1 :]))
        corner.append(at)
    best = end - begin
    for size in product(*(range(1, n - at + 1) for n, at in zip(shape, corner, strict=True))):
        after = begin + prod(size)
        if after <= end and numbers(shape, (tuple(corner), size)) == list(range(begin, after)):
            best = min(best, 1 + fewest(shape, after, end))
    return best


def test_nothing_and_a_scalar() -> None:
    assert list(rectangles((3, 0), 0, 0)) == []
    assert list(rectangles((), 0, 1)) == [((), ())]
    assert list(rectangles((4, 5), 3, 17)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]

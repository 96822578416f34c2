"""Rectangles in columns are what rectangles one by one are."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.shards import Box, tilings
from penteract.engine.checkpoint.boxes import first_overlap, inside, meet, volume
from penteract.engine.checkpoint.stored_boxes import StoredBoxes, by_file, key_of, row_bytes

FILES = [f"rank-{rank:05d}.safetensors" for rank in range(5)]
SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)


def of(boxes: list[tuple[int, Box]], shape: tuple[int, ...], files: list[str] = FILES) -> StoredBoxes:
    rows = [[file, *box[0], *box[1]] for file, box in boxes]
    return StoredBoxes.of_rows("w", shape, files, rows, b"".join(bytes([i % 256]) * 32 for i in range(len(rows))))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box, some of them outside."""
    return tuple(draw(st.integers(0, n)) for n in shape), tuple(draw(st.integers(0, n + 1)) for n in shape)


@given(st.data(), SHAPES, st.sampled_from([1, 300, 70_000, 2**33]), st.sampled_from([1, 300]))
def test_bytes_give_the_same_rectangles(data: st.DataObject, shape: tuple[int, ...], wider: int, more: int) -> None:
    cut = data.draw(tilings(shape, len(FILES)))
    shape, files = tuple(n * wider for n in shape), FILES * more  # as wide as a position may be
    one = of(cut, shape, files)
    raw = b"".join(one.columns())
    assert len(raw) == len(cut) * row_bytes(shape, files)
    again = StoredBoxes.of_bytes("w", shape, files, raw)
    assert [*again] == [*one]
    assert [(part.file, part.box) for part in again] == [(files[file], box) for file, box in cut]
    assert [part.key for part in again] == [key_of("w", shape, box) for _, box in cut]


@given(st.data(), SHAPES)
def test_a_cut_tiles_and_what_is_not_one_does_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    cut = data.draw(tilings(shape, 5))
    assert not of(cut, shape).untiled()
    lost = data.draw(st.integers(0, len(cut) - 1))
    left = cut[:lost] + cut[lost + 1 :]
    assert of(left, shape).untiled() == f"{volume(cut[lost][1])} elements are missing"
    twice = data.draw(st.permutations([*cut, cut[lost]]))
    assert "overlap" in of(twice, shape).untiled()


@given(st.data(), SHAPES)
def test_boxes_of_any_kind_are_found_wrong_as_one_by_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=6))
    found, columns = of([(0, box) for box in some], shape).untiled(), of([(0, box) for box in some], shape)
    if not all(inside(box, shape) for box in some):
        assert "outside" in found and columns.outside() in some
        with pytest.raises(ValueError, match="outside"):
            columns.refuse_wrong()
    elif first_overlap(some):
        assert "overlap" in found
    else:
        missing = prod(shape) - sum(map(volume, some))
        assert found == (f"{missing} elements are missing" if missing else "")


def test_a_tiling_that_no_straight_cut_parts_is_one() -> None:
    """A pinwheel."""
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert not of([(0, box) for box in boxes], (3, 3)).untiled()
    wrong = [*boxes[:4], ((1, 1), (1, 2))]
    assert of([(0, box) for box in wrong], (3, 3)).untiled() == "[0:2, 2:3] and [1:2, 1:3] overlap"


@given(st.data(), SHAPES)
def test_overlaps_are_those_of_each(data: st.DataObject, shape: tuple[int, ...]) -> None:
    cut, wanted = data.draw(tilings(shape, 5)), data.draw(boxes(shape))
    found = [(part.box, inner) for part, inner in of(cut, shape).overlapping(wanted)]
    assert found == [(box, inner) for _, box in cut if (inner := meet(box, wanted))]


@given(st.data(), st.lists(SHAPES, max_size=4))
def test_each_is_in_one_file(data: st.DataObject, shapes: list[tuple[int, ...]]) -> None:
    class Of:
        dtype = "F32"

        def __init__(self, parts: StoredBoxes) -> None:
            self.parts = parts

    tensors = {str(i): Of(of(data.draw(tilings(shape, 5)), shape)) for i, shape in enumerate(shapes)}
    parts_of = by_file(tensors, FILES)
    found = {file: [part for part, _ in parts_of(file)] for file in FILES}
    assert found == {file: [p for t in tensors.values() for p in t.parts if p.file == file] for file in FILES}

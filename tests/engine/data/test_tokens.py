from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.engine.data.corpus import TextPart
from penteract.engine.data.tokenizer import ByteTokenizer, Ids, open_tokenizer
from penteract.engine.data.tokens import TokenStream, read_tokens, tokenize, write_tokens
from penteract.errors import BadInput, CorruptData, DiskFailure

BYTES = ByteTokenizer()
PARTS = [TextPart("he", False), TextPart("y", True), TextPart("you", True)]
IDS = [104, 101, 121, 256, 121, 111, 117, 256]


def made(folder: Path) -> Path:
    path = folder / "a.bin"
    write_tokens(path, tokenize(PARTS, BYTES), BYTES)
    return path


def test_every_document_is_ended(tmp_path: Path) -> None:
    assert np.concatenate(list(tokenize(PARTS, BYTES))).tolist() == IDS
    path = made(tmp_path)
    assert read_tokens(path, BYTES).tolist() == IDS
    assert np.memmap(path, np.uint16, mode="r").tolist() == IDS
    assert json.loads((tmp_path / "a.bin.json").read_text()) == {
        "dtype": "uint16", "tokens": 8, "end_of_document": 256, "vocab_size": 257, "largest": 256}  # fmt: skip


def test_dtype_alone_is_enough_and_both_widths_are_read(tmp_path: Path) -> None:
    for dtype in ("uint16", "uint32"):
        path = tmp_path / f"{dtype}.bin"
        path.write_bytes(np.array(IDS, dtype).tobytes())
        (tmp_path / f"{dtype}.bin.json").write_text(json.dumps({"dtype": dtype}))
        assert read_tokens(path, BYTES).tolist() == IDS


def test_parts_read_as_one_stream() -> None:
    tokens = TokenStream((np.array([1, 2], np.uint16), np.array([], np.uint16), np.array([3, 4, 5], np.uint16)), 10)
    assert tokens.read(1, 4).tolist() == [2, 3, 4]
    head, tail = tokens.split_at(3)
    assert (head.read(0, 3).tolist(), tail.read(0, 2).tolist()) == ([1, 2, 3], [4, 5])
    with pytest.raises(IndexError):
        tokens.read(3, 6)


class Counted(list[Ids]):
    """Arrays of a stream, and how often one is looked up."""

    looks = 0

    def __getitem__(self, i: int) -> Ids:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(i)

    def __iter__(self) -> Iterator[Ids]:
        self.looks += len(self)
        return super().__iter__()


def test_a_read_looks_at_the_files_that_hold_it() -> None:
    """A corpus of many files costs a sample no more than one of few."""
    arrays = Counted(np.arange(4, dtype=np.uint16) + 4 * i for i in range(2000))
    tokens = TokenStream(arrays, 8000)  # type: ignore[arg-type]
    assert len(tokens) == 8000
    arrays.looks = 0
    for start in range(0, 7990, 799):
        assert tokens.read(start, start + 9).tolist() == list(range(start, start + 9))
        assert len(tokens) == 8000
    assert arrays.looks <= 10 * 2 * 4  # ten reads, of four arrays at most: its length and its ids


@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_any_part_of_any_arrays(sizes: list[int], data: st.DataObject) -> None:
    ids = np.arange(sum(sizes), dtype=np.uint16)
    tokens = TokenStream(tuple(np.split(ids, np.cumsum(sizes)[:-1])) if sizes else (), 100)
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    assert tokens.read(start, stop).tolist() == ids[start:stop].tolist()


def test_facts_that_do_not_fit(tmp_path: Path, tokenizer_file: Path) -> None:
    path, about = made(tmp_path), tmp_path / "a.bin.json"
    facts = json.loads(about.read_text())
    with pytest.raises(BadInput, match=r"made by another tokenizer · .* found end_of_document 256"):
        read_tokens(path, open_tokenizer(str(tokenizer_file)))
    for change, kind, message in [
        ({"largest": 257}, CorruptData, r"outside the vocabulary · .* found 257 / allowed 0\.\.256"),
        ({"tokens": 9}, CorruptData, "found 16 bytes / allowed 9 ids of 2 bytes"),
        ({"dtype": "int8"}, BadInput, "allowed uint16 uint32"),
    ]:
        about.write_text(json.dumps(facts | change))
        with pytest.raises(kind, match=message):
            read_tokens(path, BYTES)
    for text, message in [("{", "not JSON"), ("[]", "not a JSON object")]:
        about.write_text(text)
        with pytest.raises(CorruptData, match=message):
            read_tokens(path, BYTES)
    about.unlink()
    with pytest.raises(BadInput, match=r"fix: echo .*> /\S+/a\.bin\.json"):
        read_tokens(path, BYTES)


def test_a_torn_file_is_found(tmp_path: Path) -> None:
    path = made(tmp_path)
    for keep in (15, 14):
        with path.open("r+b") as file:
            file.truncate(keep)
        with pytest.raises(CorruptData, match="size"):
            read_tokens(path, BYTES)


def test_writers_may_race_and_leave_nothing_behind(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: made(tmp_path), range(12)))
    assert read_tokens(tmp_path / "a.bin", BYTES).tolist() == IDS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> list[TextPart]:
        raise CorruptData("TEXT", "damaged")

    with pytest.raises(CorruptData):
        write_tokens(tmp_path / "a.bin", (ids for _ in [0] for ids in tokenize(broken(), BYTES)), BYTES)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure):
        made(tmp_path / "file")

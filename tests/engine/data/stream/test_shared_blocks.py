"""Processes of a host share the blocks of a stream: one tokenises, and nothing but speed depends on it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from listed_documents import ListedDocuments
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data.stream import shared_blocks, stream_blocks, stream_samples
from penteract.engine.data.stream.shared_blocks import SharedBlocks
from penteract.engine.data.stream.stream_blocks import BlockStart, StreamBlock, read_blocks
from penteract.engine.data.stream.stream_samples import BLOCK, StreamSamples
from penteract.engine.data.tokenizer import ByteTokenizer
from penteract.errors import CorruptData

BYTES = ByteTokenizer()
COUNT = 50_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "BATCH_CHARACTERS", 500)


def source(document: Callable[[int], str] = "[{}]".format) -> ListedDocuments:
    return ListedDocuments(COUNT, document)


def opened(documents: ListedDocuments, folder: Path | None, length: int = 8) -> StreamSamples:
    return StreamSamples(documents, BYTES, DocumentPacking(length, None), 3, folder)


def rows(samples: StreamSamples, indices: range) -> list[list[int]]:
    return [samples.sample(i).tokens.tolist() for i in indices]


FIRST = BlockStart(0, "", None, 0)
EXPECTED = range(0, 12 * BLOCK, 37)


def expected() -> list[list[int]]:
    alone = opened(source(), None)
    found = rows(alone, EXPECTED)
    alone.close()
    return found


def test_one_tokenises_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "BEAT_S", 600.0)
    sources = [source() for _ in range(4)]
    ranks = [opened(documents, tmp_path / "shared") for documents in sources]
    found = [[rank.sample(i).tokens.tolist() for rank in ranks] for i in EXPECTED]  # all at the same pace
    assert all(row == [row[0]] * 4 for row in found) and [row[0] for row in found] == expected()
    assert [documents.read > 0 for documents in sources].count(True) == 1
    assert all(rank.fingerprint() == ranks[0].fingerprint() for rank in ranks)
    for rank in ranks:
        rank.close()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["lock"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3 * BLOCK)), min_size=1, max_size=6))
def test_ranks_at_any_pace_have_their_samples(turns: list[tuple[int, int]]) -> None:
    """One may be far ahead, so that what the others need is gone, or is not made yet."""
    with pytest.MonkeyPatch.context() as patched, TemporaryDirectory() as folder:
        patched.setattr(shared_blocks, "BEAT_S", 0.02)
        patched.setattr(stream_samples, "AHEAD", 0)
        alone, at = opened(source(), None), [0] * 3
        ranks = [opened(source(), Path(folder)) for _ in range(3)]
        for number, more in turns:
            at[number] += more
            here = range(at[number], at[number] + 1)
            assert rows(ranks[number], here) == rows(alone, here)
        for rank in (*ranks, alone):
            rank.close()


def test_another_goes_on_where_one_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "BEAT_S", 600.0)
    first, second = source(), source()
    ranks = [opened(first, tmp_path), opened(second, tmp_path)]
    for rank in ranks:
        rank.sample(3 * BLOCK)
    assert second.read == 0
    ranks[0].close()
    alone, later = opened(source(), None), range(20 * BLOCK, 20 * BLOCK + 40)
    assert rows(ranks[1], later) == rows(alone, later)
    alone.close()
    assert second.opened[0] > 0  # not from the first document
    ranks[1].close()


def test_one_that_does_nothing_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "BEAT_S", 0.3)
    documents = source()
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rank, began = opened(documents, tmp_path), time.monotonic()
        assert rows(rank, EXPECTED) == expected()
        assert time.monotonic() - began >= 0.3
        assert documents.opened == [0]
        rank.close()


def test_one_that_is_at_work_shows_it(tmp_path: Path) -> None:
    rank = opened(source(), tmp_path)
    rank.sample(0)
    os.utime(tmp_path / "lock", (0, 0))
    rank.sample(40 * BLOCK)  # more than were read ahead
    other = SharedBlocks(tmp_path, read_nothing, 8, 257, 2)
    assert (tmp_path / "lock").stat().st_mtime > time.time() - 600
    os.utime(tmp_path / "lock")
    assert other._is_coming(time.monotonic() - 1000)
    rank.close()
    os.utime(tmp_path / "lock", (0, 0))
    assert other._is_coming(time.monotonic()) and not other._is_coming(time.monotonic() - 1000)


def read_nothing(*_: object) -> Iterator[StreamBlock]:
    raise AssertionError("nothing is tokenised")


def first_stored(folder: Path) -> bytes:
    """The first block as a process stores it."""
    rank = opened(source(), folder)
    rank.sample(0)
    found = (folder / "block-0").read_bytes()
    rank.close()
    return found


def test_what_was_stored_is_read(tmp_path: Path) -> None:
    (tmp_path / "block-0").write_bytes(first_stored(tmp_path))
    (tmp_path / "block-x").touch()
    found = next(SharedBlocks(tmp_path, read_nothing, 8, 257, 2).read(FIRST, lambda: False))
    made = next(read_blocks(source(), BYTES, 8, FIRST))
    assert found.ends == made.ends and found.ids.tolist() == made.ids.tolist()


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:-1], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: b"", lambda raw: b"{}\n" + raw,
    lambda raw: raw.replace(b'"before": "', b'"before": "0'), lambda raw: raw.replace(b"uint16", b"uint32"),
    lambda raw: raw.replace(b'"block": 1', b'"block": 2'), lambda raw: b"[" * 99999 + raw,
])  # fmt: skip
def test_what_does_not_fit_is_made_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    raw = first_stored(tmp_path)
    assert damage(raw) != raw
    (tmp_path / "block-0").write_bytes(damage(raw))
    documents = source()
    rank = opened(documents, tmp_path)
    assert rows(rank, EXPECTED) == expected() and documents.opened == [0]
    rank.close()


def test_a_full_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "BEAT_S", 0.02)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ranks = [opened(source(), tmp_path) for _ in range(2)]
    for i in EXPECTED:
        assert ranks[0].sample(i).tokens.tolist() == ranks[1].sample(i).tokens.tolist()
    for rank in ranks:
        rank.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_no_folder_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "BEAT_S", 0.02)
    (tmp_path / "file").touch()
    rank = opened(source(), tmp_path / "file" / "folder")
    assert rows(rank, EXPECTED) == expected()
    rank.close()


def test_errors_are_those_of_reading(tmp_path: Path) -> None:
    def torn(i: int) -> str:
        if i == 900:
            raise CorruptData("TEXT", "torn")
        return f"[{i}]"

    rank = opened(source(torn), tmp_path)
    with pytest.raises(CorruptData, match="torn"):
        rows(rank, EXPECTED)
    with (tmp_path / "lock").open("r") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it


def test_few_are_kept(tmp_path: Path) -> None:
    rank = opened(source(), tmp_path, 64)
    for number in range(0, 20):
        rank.sample(number * BLOCK)
        assert len(list(tmp_path.glob("block-*"))) <= 2 * rank._depth + 4
    rank.close()

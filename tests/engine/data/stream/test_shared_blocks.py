"""Processes of a host share the blocks of a stream: one tokenises, and nothing but speed depends on it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from listed_documents import ListedDocuments
from penteract.engine.data import tokens
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data.stream import shared_blocks, stream_samples
from penteract.engine.data.stream.shared_blocks import SharedBlocks, SharedFolder
from penteract.engine.data.stream.stream_blocks import BlockStart, StreamBlock, read_blocks
from penteract.engine.data.stream.stream_samples import BLOCK, StreamSamples
from penteract.engine.data.tokenizer import ByteTokenizer
from penteract.errors import CorruptData

BYTES = ByteTokenizer()
COUNT = 50_000
FIRST = BlockStart(0, "", None, 0)
EXPECTED = range(0, 12 * BLOCK, 37)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 500)
    monkeypatch.setattr(stream_samples, "AHEAD", 0)  # one block


def source(document: Callable[[int], str] = "[{}]".format) -> ListedDocuments:
    return ListedDocuments(COUNT, document)


def opened(documents: ListedDocuments, shared: SharedFolder | None) -> StreamSamples:
    return StreamSamples(documents, BYTES, DocumentPacking(8, None), 3, shared)


def rows(samples: StreamSamples, indices: range) -> list[list[int]]:
    return [samples.sample(i).tokens.tolist() for i in indices]


def expected(indices: range = EXPECTED) -> list[list[int]]:
    alone = opened(source(), None)
    found = rows(alone, indices)
    alone.close()
    return found


def blocks(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("block-*"))


def close(*ranks: StreamSamples) -> None:
    for rank in ranks:
        rank.close()


# ---- one makes, all read ---------------------------------------------------------------------------------------------


def test_one_tokenises_for_all(tmp_path: Path) -> None:
    shared, sources = SharedFolder(tmp_path / "run", 4), [source() for _ in range(4)]
    ranks = [opened(documents, shared) for documents in sources]
    found = [[rank.sample(i).tokens.tolist() for rank in ranks] for i in EXPECTED]  # all at the same pace
    assert all(row == [row[0]] * 4 for row in found) and [row[0] for row in found] == expected()
    assert [documents.read > 0 for documents in sources].count(True) == 1
    assert all(rank.fingerprint() == ranks[0].fingerprint() for rank in ranks)
    assert len(blocks(shared.path)) < 8  # of 12: those that all have read are gone
    close(*ranks)
    assert not shared.path.exists()


def test_one_reads_as_far_ahead_of_the_others_as_it_likes(tmp_path: Path) -> None:
    """As in a batch of many blocks, which one rank reads first: nobody waits for the training of another."""
    shared, sources = SharedFolder(tmp_path, 3), [source() for _ in range(3)]
    ranks = [opened(documents, shared) for documents in sources]
    ranks[0].sample(0)
    for at in (0, 30 * BLOCK, 60 * BLOCK):
        there = range(at, at + 30 * BLOCK, 97)
        for rank in reversed(ranks):
            assert rows(rank, there) == expected(there)
    assert [documents.read > 0 for documents in sources] == [True, False, False]
    close(*ranks)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-BLOCK, 3 * BLOCK)), min_size=1, max_size=6))
def test_ranks_at_any_pace_have_their_samples(turns: list[tuple[int, int]]) -> None:
    """What one needs may be gone, or not be made yet; it may go back."""
    with TemporaryDirectory() as folder:
        alone, at = opened(source(), None), [0] * 3
        ranks = [opened(source(), SharedFolder(Path(folder) / "run", 2)) for _ in range(3)]
        for number, more in turns:
            at[number] = max(at[number] + more, 0)
            here = range(at[number], at[number] + 1)
            assert rows(ranks[number], here) == rows(alone, here)
        close(*ranks, alone)


def test_a_source_that_opens_slowly_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, sources, open_now = SharedFolder(tmp_path, 3), [source() for _ in range(3)], ListedDocuments.open

    def slowly(*about: object) -> object:
        time.sleep(0.5)
        return open_now(*about)  # type: ignore[arg-type]

    monkeypatch.setattr(ListedDocuments, "open", slowly)
    ranks = [opened(documents, shared) for documents in sources]
    threads = [threading.Thread(target=rank.sample, args=[0]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(documents.opened) for documents in sources) == 1
    close(*ranks)


READER = """
import sys, time
from pathlib import Path
from listed_documents import ListedDocuments
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data import tokens
from penteract.engine.data.stream import stream_samples
from penteract.engine.data.stream.shared_blocks import SharedFolder
from penteract.engine.data.stream.stream_samples import BLOCK, StreamSamples
from penteract.engine.data.tokenizer import ByteTokenizer
tokens._BATCH_CHARACTERS, stream_samples.AHEAD = 500, 0
shared = SharedFolder(Path(sys.argv[1]), 2)
samples = StreamSamples(ListedDocuments(50_000, "[{}]".format), ByteTokenizer(), DocumentPacking(8, None), 3, shared)
print(samples.sample(3 * BLOCK).tokens.tolist(), flush=True)
time.sleep(600)
"""


def test_another_goes_on_where_one_is_killed(tmp_path: Path) -> None:
    """A process of its own, with SIGKILL: its blocks stay, and its lock is free."""
    shared, documents = SharedFolder(tmp_path / "run", 2), source()
    place = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", READER, str(shared.path)]
    with subprocess.Popen(command, env=place, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            rank, third = opened(documents, shared), range(3 * BLOCK, 3 * BLOCK + 1)
            assert other.stdout.readline() == f"{expected(third)[0]}\n"
            assert rows(rank, third) == expected(third)
            assert documents.read == 0
        finally:
            other.kill()
    later = range(20 * BLOCK, 20 * BLOCK + 40)
    assert rows(rank, later) == expected(later)
    assert documents.opened[0] > 0  # not from the first document
    close(rank)


def test_folders_of_killed_runs_are_removed(tmp_path: Path) -> None:
    old, other = SharedFolder(tmp_path / "old", 2), SharedFolder(tmp_path / "other", 2)
    for folder in (old, other):
        folder.make()
        (folder.path / "lock").touch()
        (folder.path / "block-7").touch()
    unlocked = tmp_path / "unlocked"
    unlocked.mkdir()
    for path in (old.path / "lock", unlocked):
        os.utime(path, (0, 0))
    SharedFolder(tmp_path / "new", 2).make()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other"]
    os.utime(other.path / "lock", (0, 0))
    with (other.path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        SharedFolder(tmp_path / "new", 2).make()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other"]


# ---- what cannot be shared -------------------------------------------------------------------------------------------


def read_nothing(*_: object) -> Iterator[StreamBlock]:
    raise AssertionError("nothing is tokenised")


def first_stored(folder: Path) -> bytes:
    """The first block as a process stores it."""
    made = next(read_blocks(source(), BYTES, 8, FIRST))
    shared = SharedFolder(folder, 1)
    shared.make()
    SharedBlocks(shared, read_nothing, 8, 257, 1).store(made, "")
    return (folder / "block-0").read_bytes()


def test_what_was_stored_is_read(tmp_path: Path) -> None:
    first_stored(tmp_path)
    (tmp_path / "block-x").touch()
    found = next(SharedBlocks(SharedFolder(tmp_path, 1), read_nothing, 8, 257, 1).read(FIRST, lambda: False))
    made = next(read_blocks(source(), BYTES, 8, FIRST))
    assert found.ends == made.ends and found.ids.tolist() == made.ids.tolist()


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:-1], lambda raw: raw[:-1] + b"\xff", lambda raw: b"", lambda raw: b"{}\n" + raw,
    lambda raw: b"[" * 99999 + raw, lambda raw: raw.replace(b"uint16", b"uint32"),
    lambda raw: raw.replace(b'"before": "', b'"before": "0'), lambda raw: raw.replace(b'"block": 1', b'"block": 2'),
    lambda raw: raw.replace(b'"skipped": ', b'"skipped": -'),
])  # fmt: skip
def test_what_does_not_fit_is_made_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    raw = first_stored(tmp_path)
    assert damage(raw) != raw
    (tmp_path / "block-0").write_bytes(damage(raw))
    documents = source()
    rank = opened(documents, SharedFolder(tmp_path, 1))
    assert rows(rank, EXPECTED) == expected() and documents.opened[0] == 0
    close(rank)


def test_a_full_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ranks = [opened(source(), SharedFolder(tmp_path, 2)) for _ in range(2)]
    assert rows(ranks[0], EXPECTED) == rows(ranks[1], EXPECTED) == expected()
    assert not blocks(tmp_path) and not list(tmp_path.glob("new-*"))
    close(*ranks)


def test_a_want_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    rank = opened(source(), SharedFolder(tmp_path, 2))
    assert rows(rank, EXPECTED) == expected()
    close(rank)


def test_a_thread_that_cannot_start_leaves_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "make-blocks":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    rank = opened(source(), SharedFolder(tmp_path / "run", 2))
    assert rows(rank, EXPECTED) == expected()
    monkeypatch.undo()
    other = opened(source(), SharedFolder(tmp_path / "run", 2))
    assert rows(other, EXPECTED) == expected()
    close(rank, other)


def test_a_lock_that_somebody_removes_costs_only_time(tmp_path: Path) -> None:
    ranks = [opened(source(), SharedFolder(tmp_path, 2)) for _ in range(2)]
    for i in EXPECTED:
        (tmp_path / "lock").unlink(missing_ok=True)
        assert ranks[0].sample(i).tokens.tolist() == ranks[1].sample(i).tokens.tolist()
    close(*ranks)


def test_no_more_than_some_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one of those that should read does not."""
    monkeypatch.setattr(shared_blocks, "MOST", 5 * BLOCK * 8 * 2)
    ranks = [opened(source(), SharedFolder(tmp_path, 3)) for _ in range(2)]
    for i in EXPECTED:
        for rank in ranks:
            rank.sample(i)
        assert len(blocks(tmp_path)) <= 6
    assert rows(ranks[0], EXPECTED) == rows(ranks[1], EXPECTED) == expected()
    close(*ranks)


def test_nothing_is_left_of_runs_that_end_while_blocks_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_samples, "AHEAD", 2**20)
    for number in range(20):
        rank = opened(source(), SharedFolder(tmp_path / str(number), 2))
        rank.sample(number)
        rank.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", [False, True])
def test_no_folder_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    if made:  # but there can be no lock in it

        def refused(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(shared_blocks, "_hold", refused)
    else:
        (tmp_path / "run").touch()
    rank = opened(source(), SharedFolder(tmp_path / "run", 2))
    assert rows(rank, EXPECTED) == expected()
    close(rank)


def test_one_that_reads_after_the_folder_is_gone_makes_its_blocks(tmp_path: Path) -> None:
    ranks = [opened(source(), SharedFolder(tmp_path / "run", 2)) for _ in range(2)]
    for rank in ranks:
        rank.sample(0)
    close(ranks[0])
    assert rows(ranks[1], EXPECTED) == expected()
    close(ranks[1])


def test_a_process_that_is_no_longer_seen_makes_its_blocks(tmp_path: Path) -> None:
    """Another may remove the folder while this one begins to hold its lock: then its other files are gone."""
    ranks = [opened(source(), SharedFolder(tmp_path, 2)) for _ in range(2)]
    for rank in ranks:
        rank.sample(0)
    for want in tmp_path.glob("want-*"):
        want.unlink()
    for rank in ranks:
        assert rows(rank, EXPECTED) == expected()
    close(*ranks)


def test_errors_are_those_of_reading(tmp_path: Path) -> None:
    def torn(i: int) -> str:
        if i == 900:
            raise CorruptData("TEXT", "torn")
        return f"[{i}]"

    ranks = [opened(source(torn), SharedFolder(tmp_path, 2)) for _ in range(2)]
    for rank in ranks:
        with pytest.raises(CorruptData, match="torn"):
            rows(rank, EXPECTED)
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
    close(*ranks)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from listed_documents import ListedDocuments
from penteract.engine.data import tokens
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data.stream import stream_samples
from penteract.engine.data.stream.stream_samples import BLOCK, COUNTED, StreamSamples, split_stream
from penteract.engine.data.tokenizer import ByteTokenizer
from penteract.errors import BadInput, CorruptData

BYTES = ByteTokenizer()
PACKING = DocumentPacking(8, BYTES.end_of_document)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are tokenised for each block."""
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 500)


def documents(count: int, change: Callable[[int], str] = str) -> ListedDocuments:
    return ListedDocuments(count, lambda i: f"[{change(i)}]" if i % 3 else "")


def tokens_of(source: ListedDocuments, first: int = 0) -> list[int]:
    return [t for x in map(source.document, range(first, source.count)) if x for t in [*x.encode(), 256]]


def opened(source: ListedDocuments, seed: int = 0) -> StreamSamples:
    return StreamSamples(source, BYTES, PACKING, seed)


def rows(samples: StreamSamples, indices: range) -> list[list[int]]:
    return [samples.sample(i).tokens.tolist() for i in indices]


# ---- which samples there are -----------------------------------------------------------------------------------------


def test_a_block_holds_its_windows_in_an_order_of_its_own() -> None:
    source = documents(100_000)
    found, stream = rows(opened(source), range(3 * BLOCK)), tokens_of(source)
    for b in range(3):
        block = found[b * BLOCK : (b + 1) * BLOCK]
        straight = [stream[w * 8 : w * 8 + 8] for w in range(b * BLOCK, (b + 1) * BLOCK)]
        assert block != straight and sorted(block) == sorted(straight)
    assert rows(opened(source, 1), range(BLOCK)) != found[:BLOCK]


def test_each_target_is_the_next_token() -> None:
    source = documents(100_000)
    stream, samples = tokens_of(source), StreamSamples(source, BYTES, DocumentPacking(8, None), 0)
    found = {(*s.tokens, *s.targets) for s in map(samples.sample, range(2 * BLOCK))}
    assert found == {(*stream[w * 8 : w * 8 + 8], *stream[w * 8 + 1 : w * 8 + 9]) for w in range(2 * BLOCK)}


def test_a_short_stream_starts_over() -> None:
    source = documents(20)
    stream = tokens_of(source) * 400
    assert sorted(rows(opened(source), range(BLOCK))) == sorted(stream[w * 8 : w * 8 + 8] for w in range(BLOCK))


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(BadInput, match="EMPTY"):
        opened(documents(1)).sample(0)
    with pytest.raises(IndexError):
        opened(documents(9)).sample(-1)


def test_train_leaves_the_documents_of_validation_out() -> None:
    source, held = documents(20_000), COUNTED // 100
    train, validation = split_stream(source, BYTES, PACKING, fraction=0.01, seed=0)
    head = tokens_of(source)[: len(tokens_of(source)) - len(tokens_of(source, held))]
    assert len(validation) == (len(head) - 1) // 8
    assert len(train) == sys.maxsize
    straight = tokens_of(source, held)
    assert sorted(rows(train, range(BLOCK))) == sorted(straight[w * 8 : w * 8 + 8] for w in range(BLOCK))
    got = sorted(t for i in range(len(validation)) for t in validation.sample(i).tokens.tolist())
    assert got == sorted(head[: len(validation) * 8])
    assert len(split_stream(source, BYTES, PACKING, fraction=0, seed=0)[1]) == 0


# ---- where they are read on ------------------------------------------------------------------------------------------


def test_a_thread_reads_ahead() -> None:
    source = documents(100_000)
    samples = opened(source)
    first = samples.sample(0).tokens.tolist()
    assert samples._ahead is not None
    block = samples._ahead.take()  # nobody asked for it
    assert block.number == 1 and first not in block.ids.reshape(-1).tolist()
    samples.close()


def test_going_back_reads_from_the_nearest_start() -> None:
    source = documents(100_000)
    samples = opened(source, 5)
    whole = rows(samples, range(4 * BLOCK))
    assert rows(samples, range(2 * BLOCK + 9, 3 * BLOCK)) == whole[2 * BLOCK + 9 : 3 * BLOCK]
    assert len(source.opened) == 2 and source.opened[1] > 500  # documents
    assert rows(samples, range(5)) == whole[:5]
    assert source.opened[2] == 0


@given(
    st.integers(1, 400), st.integers(0, 5 * BLOCK), st.integers(0, 3 * BLOCK), st.sampled_from([1, 90, 500, 10**6]),
    st.sampled_from([0, 3, 40]),
)  # fmt: skip
def test_a_resumed_stream_has_the_samples_of_a_whole_one(count: int, at: int, more: int, batch: int, held: int) -> None:
    """Wherever it stopped, however long it is, and however many documents are tokenised together then."""
    source = documents(count + held)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokens, "_BATCH_CHARACTERS", batch)
        patched.setattr(stream_samples, "AHEAD", 0)
        if not tokens_of(source, held):
            return
        whole, _ = split_stream(source, BYTES, PACKING, fraction=held / COUNTED, seed=1)
        rows(whole, range(at, at + 1))
        position, then = json.loads(json.dumps(whole.position(at))), whole.fingerprint()
        expected = rows(whole, range(at, at + more))
        whole.close()
        patched.setattr(tokens, "_BATCH_CHARACTERS", 200)
        resumed, _ = split_stream(source, BYTES, PACKING, fraction=held / COUNTED, seed=1)
        resumed.expect(then)
        resumed.go_on(position)
        assert rows(resumed, range(at, at + more)) == expected
        assert resumed._next - position["block"] <= 2 + (at % BLOCK + more) // BLOCK
        resumed.close()


def test_a_resumed_stream_reads_only_what_comes_then() -> None:
    source = documents(100_000)
    first = opened(source)
    first.sample(40 * BLOCK)
    position = first.position(40 * BLOCK)
    first.close()
    assert position["block"] == 40
    source.read, after = 0, opened(source)
    after.go_on(position)
    assert after.sample(40 * BLOCK).tokens.tolist() == first.sample(40 * BLOCK).tokens.tolist()
    assert min(source.opened[1:]) > 9000
    after.close()


def test_where_all_that_was_read_is_trained_on_a_block_is_read_again_to_be_compared() -> None:
    source = documents(100_000)
    first = opened(source)
    first.sample(3 * BLOCK - 1)
    position, then = first.position(3 * BLOCK), first.fingerprint()
    assert (position["block"], then["blocks"]) == (2, 3)
    other = opened(documents(100_000, lambda i: str(i + (i > 300))))  # further on than the position
    other.expect(then)
    other.go_on(position)
    with pytest.raises(BadInput, match="not what the run was trained on"):
        other.sample(3 * BLOCK)


@pytest.mark.parametrize(("name", "length"), [("another", 8), ("listed", 9)])
def test_a_position_of_another_source_is_not_used(name: str, length: int) -> None:
    source = documents(100_000)
    first = opened(source)
    first.sample(3 * BLOCK)
    position = first.position(3 * BLOCK)
    source.name = name
    other = StreamSamples(source, BYTES, DocumentPacking(length, None), 0)
    other.go_on(position)
    other.sample(3 * BLOCK)
    assert source.opened[-1] == 0


def test_a_position_that_was_given_is_given_again() -> None:
    first = opened(documents(100_000))
    first.sample(5 * BLOCK)
    position = first.position(5 * BLOCK)
    other = opened(documents(100_000))
    other.go_on(position)
    assert other.position(5 * BLOCK) == position  # it has read nothing
    other.sample(5 * BLOCK)
    assert other.position(5 * BLOCK) == position


@pytest.mark.parametrize("change", [
    {"block": "x"}, {"skipped": None}, {"block": None}, {"block": -1}, {"skipped": -1}, {"position": "x"},
])  # fmt: skip
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    samples = opened(documents(100_000))
    samples.sample(0)
    with pytest.raises(CorruptData, match="position in its stream"):
        samples.go_on({**samples.position(0), **change})


def test_what_fails_is_raised_where_it_is_asked_for_and_may_be_tried_again() -> None:
    failing = [True]

    def document(i: int) -> str:
        if i == 2000 and failing:
            raise CorruptData("TEXT", "torn")
        return f"<{i}>"

    samples = opened(ListedDocuments(100_000, document))
    good = rows(samples, range(2 * BLOCK))
    for _ in range(2):
        with pytest.raises(CorruptData, match="torn"):
            rows(samples, range(2 * BLOCK, 9 * BLOCK))
    failing.clear()
    samples.sample(9 * BLOCK)
    assert rows(samples, range(2 * BLOCK)) == good
    samples.close()

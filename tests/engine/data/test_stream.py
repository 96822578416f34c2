from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penteract.engine.data.corpus import StreamedCorpus
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data.stream import BLOCK, COUNTED, StreamSamples, hugging_face_texts, split_stream
from penteract.engine.data.tokenizer import ByteTokenizer
from penteract.errors import BadInput, CorruptData

BYTES = ByteTokenizer()
PACKING = DocumentPacking(8, BYTES.end_of_document)


class Source:
    """Documents that know their number, and count how often they were opened."""

    def __init__(self, count: int) -> None:
        self.count, self.opened = count, 0

    def __call__(self) -> Iterator[str]:
        self.opened += 1
        return (f"[{i}]" if i % 3 else "" for i in range(self.count))

    def stream(self, start: int = 0) -> list[int]:
        return [t for x in itertools.islice(self(), start, None) if x for t in [*x.encode(), 256]]


def rows(samples: StreamSamples, indices: range) -> list[list[int]]:
    return [samples.sample(i).tokens.tolist() for i in indices]


def test_a_block_holds_its_windows_in_an_order_of_its_own() -> None:
    source = Source(100_000)
    found, stream = rows(StreamSamples(source, BYTES, PACKING, 0), range(3 * BLOCK)), source.stream()
    for b in range(3):
        block = found[b * BLOCK : (b + 1) * BLOCK]
        straight = [stream[w * 8 : w * 8 + 8] for w in range(b * BLOCK, (b + 1) * BLOCK)]
        assert block != straight and sorted(block) == sorted(straight)
    assert rows(StreamSamples(source, BYTES, PACKING, 1), range(BLOCK)) != found[:BLOCK]


def test_resuming_is_reading_on() -> None:
    source = Source(100_000)
    whole = rows(StreamSamples(source, BYTES, PACKING, 5), range(3 * BLOCK))
    source.opened = 0
    samples = StreamSamples(source, BYTES, PACKING, 5)
    assert rows(samples, range(2 * BLOCK + 9, 3 * BLOCK)) == whole[2 * BLOCK + 9 :]
    assert rows(samples, range(2 * BLOCK, 2 * BLOCK + 9)) == whole[2 * BLOCK : 2 * BLOCK + 9]
    assert source.opened == 1
    assert rows(samples, range(5)) == whole[:5]  # going back starts again
    assert source.opened == 2


def test_a_short_stream_starts_over() -> None:
    source = Source(20)
    stream = source.stream() * 400
    found = rows(StreamSamples(source, BYTES, PACKING, 0), range(BLOCK))
    assert sorted(found) == sorted(stream[w * 8 : w * 8 + 8] for w in range(BLOCK))


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(BadInput, match="EMPTY"):
        StreamSamples(Source(1), BYTES, PACKING, 0).sample(0)
    with pytest.raises(IndexError):
        StreamSamples(Source(9), BYTES, PACKING, 0).sample(-1)


def test_train_leaves_the_documents_of_validation_out() -> None:
    source, held = Source(20_000), COUNTED // 100
    train, validation = split_stream(source, BYTES, PACKING, fraction=0.01, seed=0)
    head = source.stream()[: len(source.stream()) - len(source.stream(held))]
    assert len(validation) == (len(head) - 1) // 8
    assert len(train) == sys.maxsize
    straight = source.stream(held)
    assert sorted(rows(train, range(BLOCK))) == sorted(straight[w * 8 : w * 8 + 8] for w in range(BLOCK))
    got = sorted(t for i in range(len(validation)) for t in validation.sample(i).tokens.tolist())
    assert got == sorted(head[: len(validation) * 8])
    assert len(split_stream(source, BYTES, PACKING, fraction=0, seed=0)[1]) == 0


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r'fix: pip install "penteract\[hf\]"'):
        hugging_face_texts(StreamedCorpus("a", ""))


def test_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(
        name: str, config: str | None, *, split: str, streaming: bool, revision: str | None
    ) -> list[dict[str, object]]:
        assert (split, streaming) == ("train", True)
        if name == "none":
            raise FileNotFoundError(f"no dataset {name}")
        return [{"text": f"{name} {config} {revision}"}, {"kernel": 1}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    texts = iter(hugging_face_texts(StreamedCorpus("a", "c"))())
    assert next(texts) == "a c None"
    with pytest.raises(CorruptData, match="row 1 · found kernel"):
        next(texts)
    assert next(iter(hugging_face_texts(StreamedCorpus("a", ""))())) == "a None None"
    assert next(iter(hugging_face_texts(StreamedCorpus("a", "c", "v2"))())) == "a c v2"
    with pytest.raises(BadInput, match="could not open the dataset · hf:none · found no dataset none"):
        hugging_face_texts(StreamedCorpus("none", ""))
    with pytest.raises(BadInput, match=r"could not open the dataset · hf:none at revision v2 · found"):
        hugging_face_texts(StreamedCorpus("none", "", "v2"))

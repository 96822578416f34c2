"""Samples of a stream that can only be read forwards."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np

from penteract.engine.data.corpus import StreamedCorpus, TextPart
from penteract.engine.data.fingerprint import Fingerprint, compare
from penteract.engine.data.order import permute
from penteract.engine.data.pack import Array, DocumentPacking, Sample, WindowSamples
from penteract.engine.data.tokenizer import TextTokenizer
from penteract.engine.data.tokens import TokenStream, tokenize
from penteract.errors import BadInput, CorruptData

BLOCK = 256  # windows that are in memory at once and shuffled together
COUNTED = 10_000  # documents of which validation takes its fraction, because a stream's length is unknown

Texts = Callable[[], Iterable[str]]


class StreamSamples:
    """Windows of a stream of documents, in blocks of BLOCK windows that are shuffled separately.

    For an index in the current block or a later one the stream is read on; for an earlier one it is read again from the
    beginning.  So resuming tokenises everything before the first sample.  After its end the stream starts again.
    """

    def __init__(self, texts: Texts, tokenizer: TextTokenizer, packing: DocumentPacking, seed: int) -> None:
        self._texts, self._tokenizer, self._packing, self._seed = texts, tokenizer, packing, seed
        self._reader: Iterator[Array] = iter(())
        self._block: list[Array] = []
        self._number = -1
        self._digests = [""]  # of the stream up to each block
        self._expected: Fingerprint | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"no sample {index}")
        number, at = divmod(index, BLOCK)
        if self._number < 0 or number < self._number:
            self._reader, self._number = self._windows(), -1
        while self._number < number:
            self._block = list(itertools.islice(self._reader, BLOCK))
            self._number += 1
            self._note_block()
        return self._packing.sample(self._block[permute(at, BLOCK, self._seed, number)])

    def fingerprint(self) -> Fingerprint:
        return {"blocks": len(self._digests) - 1, "digest": self._digests[-1]}

    def expect(self, then: Fingerprint) -> None:
        self._expected = then
        if len(self._digests) > then.get("blocks", 0):
            self._compare()

    def _note_block(self) -> None:
        """Digest the present block, unless it was read before."""
        if self._number + 1 == len(self._digests):
            found = hashlib.blake2b(self._digests[-1].encode(), digest_size=16)
            for window in self._block:
                found.update(window.tobytes())
            self._digests.append(found.hexdigest())
            if self._expected is not None and self._expected.get("blocks") == len(self._digests) - 1:
                self._compare()

    def _compare(self) -> None:
        assert self._expected is not None
        then, self._expected = self._expected, None
        blocks = then.get("blocks", 0)
        compare(then, {"blocks": blocks, "digest": self._digests[blocks]})

    def _windows(self) -> Iterator[Array]:
        """Every window [S + 1] of the stream repeated without end."""
        length, pending, size = self._packing.sequence_length, list[Array](), 0
        while True:
            empty = True
            for ids in tokenize(as_parts(self._texts()), self._tokenizer):
                pending.append(ids.astype(np.int64))
                size, empty = size + len(ids), False
                if size > length:
                    joined = np.concatenate(pending)
                    used = (size - 1) // length * length
                    for first in range(0, used, length):
                        yield joined[first : first + length + 1]
                    pending, size = [joined[used:]], size - used
            if empty:
                raise _no_text()


def as_parts(texts: Iterable[str]) -> Iterator[TextPart]:
    """Whole documents, without empty ones."""
    return (TextPart(text, ends_document=True) for text in texts if text)


def split_stream(
    texts: Texts, tokenizer: TextTokenizer, packing: DocumentPacking, *, fraction: float, seed: int
) -> tuple[StreamSamples, WindowSamples]:
    """(train, validation): validation is the first `fraction` of COUNTED documents, held in memory."""
    held = round(COUNTED * fraction)
    arrays = tuple(tokenize(as_parts(itertools.islice(texts(), held)), tokenizer))
    tokens = TokenStream((np.concatenate(arrays),) if arrays else (), tokenizer.vocab_size)
    train = StreamSamples(lambda: itertools.islice(texts(), held, None), tokenizer, packing, seed)
    return train, WindowSamples(tokens, packing, 0, one_order=True)


def hugging_face_texts(corpus: StreamedCorpus) -> Texts:
    """The field `text` of the split `train`, streamed in the dataset's own order."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError as e:
        raise no_datasets(corpus) from e
    try:
        rows = cast("Iterable[dict[str, object]]",
                    load_dataset(corpus.name, corpus.config or None, split="train", streaming=True,
                                 revision=corpus.revision or None))  # fmt: skip
    except Exception as e:  # the library raises many kinds: no such name, no network, no permission
        raise not_opened(corpus, e) from e

    def texts() -> Iterator[str]:
        for number, row in enumerate(rows):
            text = row.get("text")
            if not isinstance(text, str):
                where = f"hf:{corpus.name}, row {number}"
                raise CorruptData("TEXT", 'no field "text" that holds a string', where=where, found=", ".join(row),
                                  fix='name a dataset with a field "text"')  # fmt: skip
            yield text

    return texts


def not_opened(corpus: StreamedCorpus, e: Exception) -> BadInput:
    """The error where the dataset cannot be opened."""
    at = f" at revision {corpus.revision}" if corpus.revision else ""
    return BadInput("SOURCE", "could not open the dataset", where=f"hf:{corpus.name}{at}", found=e,
                    fix="check its name, its config (hf:NAME:CONFIG) and the network")  # fmt: skip


def no_datasets(corpus: StreamedCorpus) -> BadInput:
    """The error where the library that streams is missing."""
    return BadInput("NO_DATASETS", "streaming from Hugging Face needs the library `datasets`",
                    found=f"hf:{corpus.name}", fix='pip install "penteract[hf]"')  # fmt: skip


def _no_text() -> BadInput:
    return BadInput("EMPTY", "the stream holds no text", found="0 tokens", fix="name a dataset with text in it")

"""Tokens of a stream of documents, in blocks of so many windows, each of which can be read on from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penteract.engine.data.corpus import TextPart
from penteract.engine.data.stream.documents import Documents, Position
from penteract.engine.data.tokenizer import Ids, TextTokenizer, id_type
from penteract.engine.data.tokens import batches, tokenize_batch
from penteract.errors import BadInput, CorruptData

BLOCK = 256  # windows that are shuffled together


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Where a block begins.

    number: how many blocks there are before it
    digest: of all tokens before it
    position, skipped: so many tokens after the beginning of the document at `position`; None: of the first
    """

    number: int
    digest: str
    position: Position | None
    skipped: int

    def as_json(self) -> dict[str, Any]:
        return {"block": self.number, "digest": self.digest, "position": self.position, "skipped": self.skipped}

    @staticmethod
    def parse(content: Position) -> BlockStart:
        """Raises CorruptData."""
        try:
            number, skipped, position = int(content["block"]), int(content["skipped"]), content["position"]
            if number < 0 or skipped < 0 or not isinstance(position, Mapping | None):
                raise ValueError(f"block {number}, skipped {skipped}, position {position}")
            return BlockStart(number, str(content["digest"]), position, skipped)
        except (KeyError, TypeError, ValueError) as e:
            raise CorruptData("STREAM", "the checkpoint's position in its stream of data is damaged",
                              found=repr(e)[:120], fix="use another step's checkpoint") from e  # fmt: skip


class StreamBlock(NamedTuple):
    """BLOCK windows of S tokens. `ids` [BLOCK·S + 1]: the last is the next block's first. `ends`: where that begins."""

    number: int
    ids: Ids
    ends: BlockStart


ReadBlocks = Callable[[BlockStart, Callable[[], bool]], Iterator[StreamBlock]]  # from a start on, until it is stopped


class _Batch(NamedTuple):
    """Tokens of documents that were tokenised together, and the position of the first of these."""

    position: Position | None
    ids: Ids


def read_blocks(
    documents: Documents, tokenizer: TextTokenizer, length: int, start: BlockStart,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[StreamBlock]:  # fmt: skip
    """The blocks of windows of `length` tokens from `start` on, of documents that are repeated without end, until
    `stopped`. Raises what reading raises; BadInput if there is no text."""
    skipped, number, digest = start.skipped, start.number, start.digest
    size, filled = BLOCK * length + 1, 0
    ids: Ids = np.empty(size, id_type(tokenizer.vocab_size))
    for batch in _batches(documents, tokenizer, start.position, stopped):
        at = min(skipped, len(batch.ids))
        skipped -= at
        while at < len(batch.ids):
            part = batch.ids[at : at + size - filled]
            ids[filled : filled + len(part)] = part
            filled, at = filled + len(part), at + len(part)
            if filled == size:
                number, digest, last = number + 1, digest_of(digest, ids, length), ids[-1]
                yield StreamBlock(number - 1, ids, BlockStart(number, digest, batch.position, at - 1))
                ids = np.empty_like(ids)
                ids[0], filled = last, 1  # the last token is the next block's first


def digest_of(before: str, ids: Ids, length: int) -> str:
    """Of all tokens up to the end of a block, whose predecessors have the digest `before`."""
    found = hashlib.blake2b(before.encode(), digest_size=16)
    for at in range(0, BLOCK * length, length):
        found.update(ids[at : at + length + 1].astype(np.int64).tobytes())
    return found.hexdigest()


def _batches(
    documents: Documents, tokenizer: TextTokenizer, position: Position | None, stopped: Callable[[], bool]
) -> Iterator[_Batch]:
    while True:
        opened, empty = documents.open(position), position is None
        for parts in batches(as_parts(opened)):
            if stopped():
                return
            empty = False
            yield _Batch(position, np.concatenate([*tokenize_batch(parts, tokenizer)]))
            position = opened.position()
        if empty:
            raise BadInput("EMPTY", "the stream holds no text", found="0 tokens", fix="name a dataset with text in it")
        position = None


def as_parts(texts: Iterable[str]) -> Iterator[TextPart]:
    """Whole documents, without empty ones."""
    return (TextPart(text, ends_document=True) for text in texts if text)

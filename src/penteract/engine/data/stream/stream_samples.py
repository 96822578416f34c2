"""Samples of a stream that can only be read forwards."""

from __future__ import annotations

import itertools
import sys
from functools import partial

import numpy as np

from penteract.engine.data.fingerprint import Fingerprint, compare
from penteract.engine.data.order import permute
from penteract.engine.data.pack import DocumentPacking, Sample, WindowSamples
from penteract.engine.data.stream.documents import Documents, LaterDocuments, Position
from penteract.engine.data.stream.read_ahead import ReadAhead
from penteract.engine.data.stream.shared_blocks import SharedBlocks, SharedFolder
from penteract.engine.data.stream.stream_blocks import (
    BLOCK,
    BlockStart,
    ReadBlocks,
    StreamBlock,
    as_parts,
    read_blocks,
)
from penteract.engine.data.tokenizer import TextTokenizer, id_type
from penteract.engine.data.tokens import TokenStream, tokenize
from penteract.units import MIB

COUNTED = 10_000  # documents of which validation takes its fraction, because a stream's length is unknown
AHEAD = 64 * MIB  # of tokens that are read before they are asked for: several batches
_STARTS = 4096  # that are remembered at most


class StreamSamples:
    """Windows of a stream of documents, in blocks of BLOCK windows that are shuffled separately.

    A thread reads the next blocks. For an index in an earlier block than the present one the stream is read again, from
    the nearest start that is known. After its end the stream starts again.
    """

    def __init__(
        self, documents: Documents, tokenizer: TextTokenizer, packing: DocumentPacking, seed: int,
        shared: SharedFolder | None = None,
    ) -> None:  # fmt: skip
        """`shared`: where processes of this host share their blocks."""
        self._shared = shared
        self._documents, self._tokenizer, self._packing, self._seed = documents, tokenizer, packing, seed
        self._starts = {0: BlockStart(0, "", None, 0)}  # of blocks, by number
        self._block: StreamBlock | None = None
        self._ahead: ReadAhead[StreamBlock] | None = None
        self._next = 0  # the number of the block that is read ahead first
        self._given = 0  # the newest block whose start was not read but given
        self._expected: Fingerprint | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"no sample {index}")
        number, at = divmod(index, BLOCK)
        first = permute(at, BLOCK, self._seed, number) * self._packing.sequence_length
        window = self._read(number).ids[first : first + self._packing.sequence_length + 1]
        return self._packing.sample(np.array(window, np.int64))

    def fingerprint(self) -> Fingerprint:
        newest = self._starts[max(self._starts)]
        return {"blocks": newest.number, "digest": newest.digest}

    def expect(self, then: Fingerprint) -> None:
        self._expected = then
        self._compare()

    def position(self, index: int) -> Position:
        newest = max(self._starts)
        read = newest - (newest > self._given)  # so a resumed run reads something that is compared
        number = max(n for n in self._starts if n <= min(index // BLOCK, read))
        return {"of": self._name, **self._starts[number].as_json()}

    def go_on(self, position: Position) -> None:
        if position.get("of") == self._name:
            start = BlockStart.parse(position)
            self._starts[start.number], self._given = start, start.number

    @property
    def _name(self) -> str:
        """Of what a position means the same."""
        return f"{self._documents.name} {self._tokenizer.digest} {self._packing.sequence_length}"

    def _read(self, number: int) -> StreamBlock:
        """A block, read on to, or read again."""
        if self._block is not None and self._block.number == number:
            return self._block
        start = self._starts[max(n for n in self._starts if n <= number)]
        if self._ahead is None or self._next > number or self._next < start.number:
            self._stop()
            self._ahead, self._next = ReadAhead(partial(self._blocks(), start), self._depth), start.number
        try:
            while self._next <= number:
                self._block = self._ahead.take()
                self._next += 1
                self._note(self._block.ends)
        except BaseException:
            self._stop()  # a later call tries again
            raise
        assert self._block is not None
        return self._block

    def _blocks(self) -> ReadBlocks:
        length = self._packing.sequence_length
        made = partial(read_blocks, self._documents, self._tokenizer, length)
        if self._shared is None:
            return made
        self._shared.make()
        return SharedBlocks(self._shared, made, length, self._tokenizer.vocab_size, self._depth).read

    def close(self) -> None:
        self._stop()
        if self._shared is not None:
            self._shared.remove()

    def _stop(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    @property
    def _depth(self) -> int:
        block = BLOCK * self._packing.sequence_length * id_type(self._tokenizer.vocab_size).itemsize
        return min(max(AHEAD // block, 1), 16)

    def _note(self, start: BlockStart) -> None:
        self._starts[start.number] = start
        if len(self._starts) > _STARTS:
            del self._starts[min(self._starts.keys() - {0})]
        self._compare()

    def _compare(self) -> None:
        """With what is expected, once it has been read so far."""
        then = self._expected
        if then is not None and (start := self._starts.get(then.get("blocks", 0))) is not None:
            self._expected = None
            compare(then, {"blocks": start.number, "digest": start.digest})


def split_stream(
    documents: Documents,
    tokenizer: TextTokenizer,
    packing: DocumentPacking,
    *,
    fraction: float,
    seed: int,
    shared: SharedFolder | None = None,
) -> tuple[StreamSamples, WindowSamples]:
    """(train, validation): validation is the first `fraction` of COUNTED documents, held in memory. `shared`: as of
    StreamSamples."""
    held = round(COUNTED * fraction)
    arrays = tuple(tokenize(as_parts(itertools.islice(documents.open(), held)), tokenizer)) if held else ()
    tokens = TokenStream((np.concatenate(arrays),) if arrays else (), tokenizer.vocab_size)
    train = StreamSamples(LaterDocuments(documents, held), tokenizer, packing, seed, shared)
    return train, WindowSamples(tokens, packing, 0, one_order=True)

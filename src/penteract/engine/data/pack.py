"""Windows of a stream of tokens, with the boundaries of documents inside them.

Window w of sequence length S covers tokens [w·S, w·S + S]: its last token is the next window's first, so every token
but the stream's first is a target exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penteract.engine.data import fingerprint
from penteract.engine.data.fingerprint import Fingerprint
from penteract.engine.data.order import permute
from penteract.engine.data.stream.documents import Position
from penteract.engine.data.tokens import TokenStream
from penteract.errors import BadInput

Array = npt.NDArray[np.int64]

IGNORED = -1
SEARCH = 2**20  # tokens on each side of a cut in which `split` searches for the end of a document


@dataclass(frozen=True)
class Sample:
    """One sequence, all fields int64 [S].

    targets: the next token, or IGNORED if that belongs to another document.
    start: index in the window of the first token of the same document; 0 if it began before the window.
    positions: the token's index minus `start`.
    """

    tokens: Array
    targets: Array
    start: Array
    positions: Array


class Samples(Protocol):
    """Samples by global index. An index of `len` or more belongs to a later epoch, which has another order."""

    def __len__(self) -> int:
        """Samples in an epoch; `sys.maxsize` when the source is a stream of unknown length."""
        ...

    def sample(self, index: int) -> Sample:
        """The sample of a global index."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Of the content; of a stream, up to what was read."""
        ...

    def expect(self, then: Fingerprint) -> None:
        """Raise BadInput unless the content is that of a fingerprint; of a stream, once it has been read so far."""
        ...

    def position(self, index: int) -> Position:
        """Where a stream is read on for the samples from `index` on, as JSON; empty of what can be read anywhere."""
        ...

    def go_on(self, position: Position) -> None:
        """Know a position, if it is one of this source. Raises CorruptData."""
        ...

    def close(self) -> None:
        """Stop what reads a stream; whoever asks for a sample begins anew."""
        ...


@dataclass(frozen=True)
class DocumentPacking:
    """Makes samples of windows. `end_of_document` None: a window counts as one document."""

    sequence_length: int
    end_of_document: int | None

    def windows(self, tokens: int) -> int:
        """The number of windows in a stream of so many tokens."""
        return max(0, (tokens - 1) // self.sequence_length)

    def sample(self, window: Array) -> Sample:
        """Tokens [S + 1] -> a sample."""
        tokens, targets = window[:-1], window[1:].copy()
        index = np.arange(self.sequence_length, dtype=np.int64)
        start = np.zeros_like(index)
        if self.end_of_document is not None:
            ends = tokens == self.end_of_document
            targets[ends] = IGNORED
            start[1:] = np.maximum.accumulate(np.where(ends, index + 1, 0))[:-1]
        return Sample(tokens, targets, start, index - start)


class WindowSamples:
    """Samples of a stream with random access.

    Epoch e visits every window once, in an order that depends on (seed, e) alone.  With `one_order` every epoch has
    the same order; validation uses this.
    """

    def __init__(self, tokens: TokenStream, packing: DocumentPacking, seed: int, *, one_order: bool = False) -> None:
        self._tokens, self._packing, self._seed, self._one_order = tokens, packing, seed, one_order
        self._windows = packing.windows(len(tokens))
        self._fingerprint: Fingerprint | None = None

    def __len__(self) -> int:
        return self._windows

    def fingerprint(self) -> Fingerprint:
        if self._fingerprint is None:
            self._fingerprint = fingerprint.of_tokens(self._tokens.arrays)
        return self._fingerprint

    def expect(self, then: Fingerprint) -> None:
        fingerprint.compare(then, self.fingerprint())

    def position(self, index: int) -> Position:
        return {}

    def go_on(self, position: Position) -> None:
        pass

    def close(self) -> None:
        pass

    def sample(self, index: int) -> Sample:
        if index < 0 or not self._windows:
            raise IndexError(f"no sample {index} among {self._windows}")
        epoch, at = divmod(index, self._windows)
        window = permute(at, self._windows, self._seed, 0 if self._one_order else epoch)
        first = window * self._packing.sequence_length
        return self._packing.sample(self._tokens.read(first, first + self._packing.sequence_length + 1))


def split(tokens: TokenStream, fraction: float, end_of_document: int) -> tuple[TokenStream, TokenStream]:
    """(train, validation): validation is the last `fraction` of the stream.

    The cut moves to the nearest end of a document within half the size of validation, at most SEARCH tokens away, so
    that no document is on both sides.  If there is none, as in a corpus of few long documents, it is inside a document.
    The cut depends neither on the seed nor on the sequence length, so all runs are validated on the same text.
    """
    if not 0 <= fraction < 1:
        raise BadInput("VALIDATION", "validation_fraction is a share of the data", found=fraction, allowed="0 <= f < 1",
                       fix="validation_fraction = 0.01")  # fmt: skip
    size = round(len(tokens) * fraction)
    at, reach = len(tokens) - size, min(size // 2, SEARCH)
    low, high = max(0, at - reach), min(len(tokens), at + reach)
    borders = low + 1 + np.flatnonzero(tokens.read(low, high) == end_of_document)
    if len(borders):
        at = int(borders[np.abs(borders - at).argmin()])
    return tokens.split_at(at)

"""Random tokens in place of text: a speed needs no data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import log

import numpy as np

from penteract.engine.data import Sample
from penteract.engine.data.fingerprint import Fingerprint
from penteract.engine.data.stream.documents import Position


@dataclass(frozen=True, slots=True)
class RandomSamples:
    """Samples of `sequence_length` tokens, each one document.

    Frequencies follow Zipf's law, as those of a text do: so a model learns them within a few steps, and its loss can
    fall. A sample is a function of the seed and its index.
    """

    vocab_size: int
    sequence_length: int
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        """The sample of a global index."""
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, index])).random(self.sequence_length + 1)
        # With x uniform, n^x has a density of 1/value: Zipf's law.
        window = np.exp(drawn * log(self.vocab_size + 1)).astype(np.int64) - 1
        window = np.minimum(window, self.vocab_size - 1)
        positions = np.arange(self.sequence_length, dtype=np.int64)
        return Sample(window[:-1], window[1:].copy(), np.zeros_like(positions), positions)

    def fingerprint(self) -> Fingerprint:
        """Of what the content follows from."""
        return {"random": self.seed, "vocab_size": self.vocab_size}

    def expect(self, then: Fingerprint) -> None:
        """Nothing: no run is resumed with random tokens."""

    def position(self, index: int) -> Position:
        """None is needed."""
        return {}

    def go_on(self, position: Position) -> None:
        """Nothing, likewise."""

    def close(self) -> None:
        """Nothing is open."""

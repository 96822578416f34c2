"""Samples for steps without numbers."""

from __future__ import annotations

import numpy as np

from penteract.engine.data import Sample


class Blank:
    """Samples without text: sequences of one document."""

    def __init__(self, length: int) -> None:
        zeros = np.zeros(length, dtype=np.int64)
        self._sample = Sample(zeros, zeros, zeros, np.arange(length))

    def __len__(self) -> int:
        return 1

    def sample(self, index: int) -> Sample:
        """The same for every index."""
        return self._sample

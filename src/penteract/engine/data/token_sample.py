"""The interface of a sample, for the checks of kernels and for the executor, which makes micro-batches of samples."""

from __future__ import annotations

from typing import Protocol


class TokenSample(Protocol):
    """One sequence. All are [S] of int64; their meaning is that of `data.pack.Sample`."""

    @property
    def tokens(self) -> object:
        """Token ids."""
        ...

    @property
    def targets(self) -> object:
        """The next token of each, or a negative number where there is none."""
        ...

    @property
    def start(self) -> object:
        """The index in the sequence at which the document of each token begins."""
        ...

    @property
    def positions(self) -> object:
        """The position of each token in its document."""
        ...

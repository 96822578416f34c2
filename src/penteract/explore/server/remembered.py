"""Answers that a worker process has given, to be given again.

An answer follows from its request alone (what is read from folders never comes to a worker), and pages ask the same
again: after Back or a reload, in another view of the same question, in a second tab.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_BYTES = 2**24  # requests and lines together


class RememberedAnswers:
    """The newest whole answers: the line of a request -> the lines of its answer. At most `most` bytes of both
    together; what was used least recently goes first."""

    def __init__(self, most: int = _MOST_BYTES) -> None:
        """Nothing is remembered yet."""
        self.most, self.bytes = most, 0
        self._answers: dict[bytes, tuple[bytes, ...]] = {}  # the one that was used last comes last

    def find(self, request: bytes) -> tuple[bytes, ...] | None:
        """The lines of the answer; None if it is not remembered."""
        if (lines := self._answers.pop(request, None)) is not None:
            self._answers[request] = lines
        return lines

    def keep(self, request: bytes, lines: Sequence[bytes]) -> None:
        """Remember a whole answer that `find` has not found."""
        self._answers[request] = tuple(lines)
        self.bytes += _size(request, lines)
        while self.bytes > self.most:
            oldest = next(iter(self._answers))
            self.bytes -= _size(oldest, self._answers.pop(oldest))


def _size(request: bytes, lines: Sequence[bytes]) -> int:
    return len(request) + sum(map(len, lines))

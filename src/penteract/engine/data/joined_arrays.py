"""Arrays that lie one behind another, read as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from penteract.engine.data.tokenizer import Ids


class JoinedArrays:
    """Where each array ends is summed up once, so a read costs the logarithm of their number: a corpus may be tens of
    thousands of files, and every sample reads a window."""

    def __init__(self, arrays: Sequence[Ids]) -> None:
        self._arrays = arrays
        self._ends = list(accumulate(map(len, arrays)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def parts(self, start: int, stop: int) -> Iterator[Ids]:
        """Ids start … stop - 1, in order, as views of the arrays that hold them. `stop`: at most the length."""
        i = bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[i])
            begin = self._ends[i] - len(self._arrays[i])
            yield self._arrays[i][start - begin : end - begin]
            i, start = i + 1, end

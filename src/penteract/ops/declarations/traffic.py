"""Memory traffic of plain torch: it runs one kernel for every elementary step of an op, and each reads and writes
memory.

A kernel runs at memory bandwidth if its tensors have the same layout and dtype. If one of them is broadcast, strided or
of another dtype, torch addresses or converts each element by itself: such a kernel "walks", and costs time per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penteract.ops.spec import Widths

Part = str | tuple[str, int]  # a tensor: the kind of its elements, and their number if it differs from the kernel's

_TEMPORARY: Mapping[str, int] = {"mask": 1, "double": 8}  # bytes of elements that only temporary tensors have
_FAMILY: Mapping[str, str] = {"mask": "mask", "index": "index"}  # others are floats


class Kernel(NamedTuple):
    """`moved`: bytes that it reads and writes. `walked`: elements that it addresses or converts one by one. `times`:
    how often it runs; fractional if the last run has less to do."""

    moved: int
    walked: int = 0
    times: float = 1.0


Kernels = tuple[Kernel, ...]


class Eager:
    """Kernels of torch under a policy's widths."""

    def __init__(self, widths: Widths) -> None:
        """`widths`: bytes of an element by role; those of masks and doubles are added."""
        self.widths = {**widths, **_TEMPORARY}

    def each(self, n: int, *parts: Part, strided: bool = False, typed: bool = False) -> Kernel:
        """A pointwise kernel of n elements. `parts`: the tensors that it reads, then the one it writes; a tensor
        changed in place counts twice. `typed`: it takes tensors of different dtypes without conversion."""
        moved, walked, first = 0, strided, ""
        for part in parts:
            kind, count = (part, n) if isinstance(part, str) else part
            first, moved = first or kind, moved + count * self.widths[kind]
            if count != n or not (typed or kind == first or self._alike(kind, first)):
                walked = True
        return Kernel(moved, n if walked else 0)

    def _alike(self, one: str, other: str) -> bool:
        """Whether two kinds of elements have one dtype."""
        return self.widths[one] == self.widths[other] and _FAMILY.get(one) == _FAMILY.get(other)

    def copy(self, n: int, source: Part, to: str, *, strided: bool = False) -> Kernel:
        """A copy of n elements. torch converts fp32 to 16 bits at memory bandwidth."""
        kind, count = (source, n) if isinstance(source, str) else source
        narrowed = (self.widths[kind], self.widths[to]) == (4, 2) and kind != "index" and count == n
        return self.each(n, source, to, strided=strided, typed=narrowed)

    def sums(self, *parts: tuple[str, int]) -> Kernel:
        """A kernel that reads its tensors in order: a sum, rows of a table, a sort."""
        return Kernel(self._bytes(parts))

    def places(self, n: int, *parts: Part) -> Kernel:
        """A kernel that reads or writes n elements by index, one by one."""
        return Kernel(self._bytes([(part, n) if isinstance(part, str) else part for part in parts]), n)

    def _bytes(self, parts: list[tuple[str, int]] | tuple[tuple[str, int], ...]) -> int:
        return sum(count * self.widths[kind] for kind, count in parts)

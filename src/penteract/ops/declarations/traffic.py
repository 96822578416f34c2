"""What the kernels of plain torch move: it runs one for every step of a declaration, and each reads and writes memory.

A kernel is as fast as memory where its tensors lie alike. Where one of them is repeated, strided or of another dtype,
torch finds the place of each element, or converts it, by itself: such a kernel walks, and takes its time by element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penteract.ops.spec import Widths

Part = str | tuple[str, int]  # a tensor: what its elements are, one for each of the kernel's; or how many there are

_BESIDE: Mapping[str, int] = {"mask": 1, "double": 8}  # bytes of elements that no register has
_FAMILY: Mapping[str, str] = {"mask": "mask", "index": "index"}  # others are floats


class Kernel(NamedTuple):
    """`moved`: bytes that it reads and writes. `walked`: elements, where it goes through them one by one. `times`: how
    often it runs, a fraction where the last of several has less to do."""

    moved: int
    walked: int = 0
    times: float = 1.0


Kernels = tuple[Kernel, ...]


class Eager:
    """Kernels of torch under a policy's widths."""

    def __init__(self, widths: Widths) -> None:
        """`widths`: bytes of an element by role, to which those of masks and doubles are added."""
        self.widths = {**widths, **_BESIDE}

    def each(self, n: int, *parts: Part, strided: bool = False, typed: bool = False) -> Kernel:
        """A pointwise kernel of n elements: `parts` are what it reads, and what it writes; a tensor that is changed in
        place is both. `typed`: its tensors have different dtypes by its nature, and are not converted."""
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
        """torch narrows fp32 to 16 bits as fast as memory."""
        kind, count = (source, n) if isinstance(source, str) else source
        narrowed = (self.widths[kind], self.widths[to]) == (4, 2) and kind != "index" and count == n
        return self.each(n, source, to, strided=strided, typed=narrowed)

    def sums(self, *parts: tuple[str, int]) -> Kernel:
        """Whatever goes through its tensors in order: sums, a table's rows, a sort."""
        return Kernel(self._bytes(parts))

    def places(self, n: int, *parts: Part) -> Kernel:
        """Elements at places that a tensor tells: one by one."""
        return Kernel(self._bytes([(part, n) if isinstance(part, str) else part for part in parts]), n)

    def _bytes(self, parts: list[tuple[str, int]] | tuple[tuple[str, int], ...]) -> int:
        return sum(count * self.widths[kind] for kind, count in parts)

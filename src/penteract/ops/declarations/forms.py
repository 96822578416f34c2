"""How the tensors of a call lie, as a kernel sees them, and what some kernels refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

ALIGNED = 16  # bytes: kernels of GPUs load so many at once


class TensorForm(NamedTuple):
    """A tensor without its numbers. `strides` and `offset` in elements of `width` bytes; `kind`: of its dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    width: int
    kind: str

    def text(self) -> str:
        """Shape and dtype, and strides where it is not contiguous: `[8, 2, 64] bfloat16 by (256, 128, 1)`."""
        by = "" if self.strides == _contiguous(self.shape) else f" by {self.strides}"
        return f"{list(self.shape)} {self.kind}{by}"


Takes = Callable[[Sequence[TensorForm]], str]  # tensors of a call -> why a kernel refuses them, or ""


def anything(forms: Sequence[TensorForm]) -> str:
    """Of kernels that take all strides."""
    return ""


def aligned_rows(forms: Sequence[TensorForm]) -> str:
    """Of kernels that load rows of 16-bit numbers 16 bytes at a time: each row is whole, and begins at a multiple."""
    for form in forms:
        if form.width != 2 or not form.shape or 0 in form.shape:
            continue
        rows = [s for n, s in zip(form.shape[:-1], form.strides[:-1], strict=True) if n > 1]
        if form.shape[-1] > 1 and form.strides[-1] != 1:
            return f"the rows of {form.text()} are not whole"
        if any(s * form.width % ALIGNED for s in (*rows, form.offset)):
            return f"the rows of {form.text()} do not begin at multiples of {ALIGNED} bytes"
    return ""


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, n = list[int](), 1
    for size in reversed(shape):
        strides.append(n)
        n *= max(1, size)
    return tuple(reversed(strides))

"""How registers lie, as kernels take them: rows at even distances, each of them whole."""

from __future__ import annotations

from math import gcd

import torch

WIDE = 1024  # columns of a tile: lines of 2 KiB in 16 bits


def row_stride(x: torch.Tensor) -> int:
    """x [.., n], which may be some columns of a wider tensor -> elements from one row to the next. Raises ValueError
    where rows are not at even distances, or not whole."""
    if x.is_contiguous():
        return x.shape[-1]
    rows = x.view(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"rows of a tensor with strides {x.stride()} are not whole")
    return rows.stride(0)


def row_count(x: torch.Tensor) -> int:
    """x [.., n] -> how many rows it has."""
    return x.numel() // x.shape[-1]


def columns(width: int) -> int:
    """Columns of a tile, a power of two: all of few, or as many as leave no tile part empty."""
    even = gcd(width, WIDE)
    return even if even >= WIDE // 8 else min(WIDE, power_of_two(width))


def tiles(n: int, size: int) -> int:
    """How many tiles of `size` hold n: Triton's own is a function of its language, dear to the host."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The least that is not below n, from 1."""
    return 1 << (n - 1).bit_length()

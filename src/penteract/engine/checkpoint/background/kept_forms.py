"""Optimizer state in the forms in which it is kept, read as the numbers that a checkpoint stores. Needs numpy alone.

State narrower than the update's dtype is widened part by part, so that a writer needs little memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.engine.checkpoint.rank_file import not_finite

Form = Literal["F64", "F32", "F16", "BF16", "I64", "split", "levels"]
Levels = Mapping[bool, list[float]]  # signed? -> the 256 levels of quantised moments
PART = 2**20  # elements that are read at a time: whole blocks of quantised moments

_WHOLE = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}


@dataclass(frozen=True, slots=True)
class KeptState:
    """Where `count` elements lie in the snapshot, and in what form.

    at      bytes from the beginning of the snapshot to their first: of split master weights the upper halves, of
            quantised moments their block's first
    other   the same of the lower halves, or of the scales of the blocks; else 0
    skip    elements of the first block that belong to others
    signed  of quantised moments: whether they are first moments
    """

    form: Form
    at: int
    count: int
    other: int = 0
    skip: int = 0
    signed: bool = True

    def as_json(self) -> list[Any]:
        """Its fields in order."""
        return [self.form, self.at, self.count, self.other, self.skip, self.signed]


def numbers(
    memory: Any, kept: KeptState, dtype: str, name: str, levels: Levels, begin: int, end: int
) -> Iterator[memoryview]:
    """The bytes of elements [begin, end) of these as `dtype` ("F32"). Raises BadNumerics, which names `name`, where one
    is not finite."""
    wide = _WHOLE[dtype]
    for at in range(begin, end, PART):
        values = _part(memory, kept, at, min(PART, end - at), wide, levels)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise not_finite(name)
        yield memoryview(values.view(np.uint8))


def _part(memory: Any, kept: KeptState, begin: int, n: int, wide: Any, levels: Levels) -> Any:
    if kept.form == "split":
        upper = _read(memory, np.uint16, kept.at, begin, n).astype(np.uint32) << 16
        low = _read(memory, np.int16, kept.other, begin, n).astype(np.int32)
        return (upper.view(np.int32) + low).view(np.float32).astype(wide, copy=False)
    if kept.form == "levels":
        first = (kept.skip + begin) // MOMENT_BLOCK * MOMENT_BLOCK  # whole blocks around them
        blocks = -(-(kept.skip + begin + n - first) // MOMENT_BLOCK)
        codes = _read(memory, np.uint8, kept.at, first, blocks * MOMENT_BLOCK)
        scales = _read(memory, np.float32, kept.other, first // MOMENT_BLOCK, blocks)
        values = np.array(levels[kept.signed], np.float32)[codes].astype(wide).reshape(blocks, MOMENT_BLOCK)
        values *= scales[:, None]
        return values.reshape(-1)[kept.skip + begin - first :][:n]
    if kept.form == "BF16":
        bits = _read(memory, np.uint16, kept.at, begin, n).astype(np.uint32) << 16
        return bits.view(np.float32).astype(wide, copy=False)
    return _read(memory, _WHOLE[kept.form], kept.at, begin, n).astype(wide, copy=False)


def _read(memory: Any, dtype: Any, at: int, begin: int, n: int) -> Any:
    return np.frombuffer(memory, dtype, n, at + begin * np.dtype(dtype).itemsize)

"""Streams of several GPUs that wait for each other without a multiprocessor: each writes a number into the others'
memory, and waits until theirs are in its own. A kernel that did it would wait for the end of products that have all of
a GPU.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from penteract.errors import Bug

SLOTS = 64  # numbers of a group in a GPU's pad, 4 bytes each
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; numbers may overflow
_met: Counter[int] = Counter()  # by the address of a group's numbers on this GPU: they outlive what made them


class StreamSignals:
    """`pads`: the addresses of the pads of a group's ranks, `me` among them; all zero at first. `number`: of the group
    among those that use the pads."""

    def __init__(self, pads: Sequence[int], me: int, number: int) -> None:
        """Nobody has met."""
        self.me, self.others = me, [i for i in range(len(pads)) if i != me]
        self.at = [pad + 4 * SLOTS * number for pad in pads]

    def meet(self) -> None:
        """What follows in the current stream waits for the others' streams."""
        stream, own = torch.cuda.current_stream().cuda_stream, self.at[self.me]
        _met[own] += 1
        count = _met[own] % 2**32
        for i in self.others:
            _call("cuStreamWriteValue32_v2", stream, self.at[i] + 4 * self.me, count)
        for i in self.others:
            _call("cuStreamWaitValue32_v2", stream, own + 4 * i, count)


@cache
def _function(name: str) -> Any:
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return found


def _call(name: str, stream: int, address: int, value: int) -> None:
    if error := _function(name)(stream, address, value, _AT_LEAST):
        raise Bug("DIRECT", f"{name} failed", found=f"CUDA error {error}", fix="--kernels.collectives library")

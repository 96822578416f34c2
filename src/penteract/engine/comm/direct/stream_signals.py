"""Streams of several GPUs that wait for each other without a multiprocessor: each writes a number into the others'
memory, and waits until theirs are in its own. A kernel that did it would wait for the end of products that have all of
a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from penteract.errors import Bug

PAD = 2048  # bytes of a GPU's pad, of torch
SLOTS = 64  # numbers of a group in a GPU's pad, 4 bytes each
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; numbers may overflow


class StreamSignals:
    """`pads`: the addresses of the pads of a group's ranks, `me` among them. `number`: of the group among those that
    use the pads. Whoever makes it lets all ranks meet on the host before the first meeting here."""

    def __init__(self, pads: Sequence[int], me: int, number: int) -> None:
        """Nobody has met: what an earlier user of the pad left in it is cleared."""
        if len(pads) > SLOTS or 4 * SLOTS * (number + 1) > PAD:
            raise Bug("DIRECT", "more numbers than a pad has room for", found=f"{len(pads)} ranks, group {number}")
        self.me, self.others, self.count = me, [i for i in range(len(pads)) if i != me], 0
        self.at = [pad + 4 * SLOTS * number for pad in pads]
        for i in self.others:
            _call("cuStreamWriteValue32_v2", torch.cuda.current_stream().cuda_stream, self.at[me] + 4 * i, 0)

    def meet(self) -> None:
        """What follows in the current stream waits for the others' streams."""
        stream, own = torch.cuda.current_stream().cuda_stream, self.at[self.me]
        self.count = (self.count + 1) % 2**32
        for i in self.others:
            _call("cuStreamWriteValue32_v2", stream, self.at[i] + 4 * self.me, self.count)
        for i in self.others:
            _call("cuStreamWaitValue32_v2", stream, own + 4 * i, self.count)


@cache
def _function(name: str) -> Any:
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return found


def _call(name: str, stream: int, address: int, value: int) -> None:
    if error := _function(name)(stream, address, value, _AT_LEAST):
        raise Bug("DIRECT", f"{name} failed", found=f"CUDA error {error}", fix="--kernels.collectives library")

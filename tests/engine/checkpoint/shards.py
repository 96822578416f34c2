"""Ranks as threads that save one checkpoint together, and random ways to cut tensors into rectangles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from hypothesis import strategies as st

from penteract.engine.checkpoint import Slice, load, prune, save

Box = tuple[tuple[int, ...], tuple[int, ...]]
Cut = list[tuple[int, Box]]  # (rank, rectangle)


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], world: int) -> Cut:
    """Guillotine cuts: a box is cut in two along a dim, again and again; each piece gets a rank."""
    boxes: list[Box] = [(tuple(0 for _ in shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(boxes) - 1))
        offset, size = boxes[at]
        dims = [d for d, n in enumerate(size) if n > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        n = draw(st.integers(1, size[dim] - 1))
        low = tuple(n if d == dim else s for d, s in enumerate(size))
        high = tuple(s - n if d == dim else s for d, s in enumerate(size))
        boxes[at : at + 1] = [(offset, low), (tuple(o + n * (d == dim) for d, o in enumerate(offset)), high)]
    return [(draw(st.integers(0, world - 1)), box) for box in boxes]


def whole(shape: Sequence[int]) -> Cut:
    return [(0, (tuple(0 for _ in shape), tuple(shape)))]


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def cut(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], rank: int) -> list[Slice]:
    """One rank's owned slices of `tensors`, as views."""
    return [
        Slice(name, tuple(t.shape), box[0], part(t, box))
        for name, t in tensors.items()
        for r, box in cuts[name]
        if r == rank
    ]


def save_all(
    folder: Path, step: int, slices: Sequence[Sequence[Slice]], extra: dict[str, Any] | None = None, keep: int = 0,
    epoch: int = 0,
) -> Path:  # fmt: skip
    """All ranks' saves at once, then rank 0's pruning; the first error of a rank is raised, and no other waits for
    it."""
    barrier = Barrier(len(slices), timeout=20)

    def meet() -> None:
        barrier.wait()

    def one(rank: int) -> Path:
        try:
            at = save(folder, step, slices[rank], extra or {"step": step}, rank=rank, world=len(slices),
                      barrier=meet, epoch=epoch)  # fmt: skip
            if rank == 0:
                prune(folder, keep, epoch)
            return at
        except BaseException:
            barrier.abort()
            raise

    if len(slices) == 1:
        return one(0)
    with ThreadPoolExecutor(len(slices)) as pool:
        tasks = [pool.submit(one, rank) for rank in range(len(slices))]
    errors = [e for task in tasks if (e := task.exception())]
    for e in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
        raise e
    return tasks[0].result()


def save_whole(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], **how: Any) -> Path:
    """By one rank."""
    return save_all(folder, step, [cut(tensors, {n: whole(t.shape) for n, t in tensors.items()}, 0)], **how)


def load_whole(at: Path, like: Mapping[str, torch.Tensor], threads: int = 1) -> dict[str, torch.Tensor]:
    """Whole tensors of these shapes and dtypes."""
    out = {name: torch.zeros_like(t) for name, t in like.items()}
    load(at, [Slice(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in out.items()], threads)
    return out


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(_bytes(t).equal(_bytes(b[n])) for n, t in a.items())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, NaNs and all: what is stored is bits."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(
        0, 256, (math.prod(shape) * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).reshape(tuple(shape))

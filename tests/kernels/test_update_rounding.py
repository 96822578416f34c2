"""The kernel's rounding by chance against torch's, bit for bit: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.run import Optimizer
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.optim.shard_update import TILE, Update
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.state import Buffers, Flat
from penteract.ops.params import Param, Shard
from penteract.parallel.data import Bucket

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MESH = Mesh(Layout(dp=2, tp=2, ep=2))
CUTS = {
    "whole": Param("a", (40, 70)),
    "rows": Param("b", (40, 70), (Shard(0, "tp"),)),
    "columns": Param("c", (40, 70), (Shard(1, "tp"),)),
    "rows shorter than a thread's": Param("d", (400, 6), (Shard(1, "tp"),)),
    "rows longer than a tile": Param("e", (3, 2600), (Shard(1, "tp"),)),
    "experts": Param("f", (4, 30, 28), (Shard(0, "ep"), Shard(1, "tp"))),
    "twice": Param("g", (6, 40, 26), (Shard(1, "tp"), Shard(2, "ep"))),
}


def pure(places: tuple[ParameterSlice, ...], n: int) -> Flat:
    """Parameters without master that only decay: a product and nothing else, the same bits in both kernels."""
    generator = torch.Generator().manual_seed(n)
    own = torch.randn(n, generator=generator).bfloat16().to(DEVICE)
    bucket = Bucket((), (), n, (0,), True, False, (0,), (0,), moments="bf16")
    return Flat(
        bucket, range(n), own, torch.zeros_like(own), None, None, own,
        {"mean": torch.zeros_like(own), "square": torch.zeros_like(own)}, {}, True, places,
    )  # fmt: skip


def decayed(kernel: int, flat: Flat, step: int = 7, parts: int = 0) -> torch.Tensor:
    """bf16 as bits. `parts`: as so many slices."""
    spec = Optimizer(weight_decay=3.0)
    adamw = (AdamW(spec, DEVICE, 5), AdamW(spec, DEVICE, 5, kernel=Update(spec, 5)))[kernel]
    adamw.rate.fill_(1e-2)
    adamw.step.fill_(step)
    moved = deepcopy(flat)
    n = len(flat.master)
    ends = [n * i // parts for i in range(parts + 1)] if parts else [0, n]
    for begin, end in pairwise(ends):
        at = slice(begin, end)
        here: Buffers = {kind: x[at] for kind, x in moved.moments.items()}
        adamw.update(moved.part(at, here) if parts else moved, adamw.factors(torch.ones((), device=DEVICE)))
    return moved.own_parameter.view(torch.int16)


@pytest.mark.parametrize("cut", CUTS)
def test_numbers_are_rounded_up_where_torch_rounds_them_up(cut: str) -> None:
    """A parameter in the middle of a shard that has no more of it, after the end of another; and padding."""
    q, other, rank = CUTS[cut], Param("z", (50, 7)), 3
    numel = q.numel(MESH)
    for begin, count in ((0, numel // 3), (numel // 3 + 1, numel // 2)):
        first = ParameterSlice.of(other, MESH, rank, at=0, begin=343, count=7)
        second = ParameterSlice.of(q, MESH, rank, at=7, begin=begin, count=count)
        third = ParameterSlice.of(other, MESH, rank, at=9 + count, begin=0, count=30)
        flat = pure((first, second, third), count + 50)
        rounded = decayed(0, flat)
        assert torch.equal(decayed(1, flat), rounded)
        assert torch.equal(decayed(1, flat, parts=3), rounded)
    assert not torch.equal(decayed(1, flat, step=8), rounded)
    assert not torch.equal(decayed(1, replace(flat, parameter_slices=(first, third))), rounded)


def test_bits_are_those_of_torch_where_places_and_steps_are_large() -> None:
    """Beyond 2^31 elements, and where products wrap."""
    n, far = 2 * TILE, 2**41 + 12345
    for place in (ParameterSlice("w", (2**40, 2**20), (2**21, 1), far, 0, 2**33 + 5, n),
                  ParameterSlice("w", (8, 2**34 + 3), (2**35, 1), 7, 0, 2**34 - 100, n)):  # fmt: skip
        flat = pure((place,), n)
        assert torch.equal(decayed(1, flat, step=2**22 + 1), decayed(0, flat, step=2**22 + 1))

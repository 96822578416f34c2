"""Rounding by chance: right on average, the same wherever an element lies. Sums in another dtype, in their place."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.engine.comm import wire_dtype as wire
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.stochastic_rounding import random_bits, round_into
from penteract.ops.params import Param, Shard
from penteract.step import update

STEP = torch.tensor(7.0, dtype=torch.float64)


def of(q: Param, mesh: Mesh, rank: int, begin: int, count: int, step: torch.Tensor = STEP) -> torch.Tensor:
    place = ParameterSlice.of(q, mesh, rank, at=3, begin=begin, count=count)
    return random_bits([place], slice(3, 3 + count), 5, step)


def test_rounding_is_right_on_average() -> None:
    """65536 roundings of each number: within five standard deviations of it, and never beyond its neighbours."""
    n = 2**16
    for x in (1.0, 1.001, -0.3, 3e-20, 1 + 2**-9, -(1 + 3 * 2**-10)):
        narrow = torch.zeros(n, dtype=torch.bfloat16)
        round_into(narrow, torch.full((n,), x), of(Param("w", (n,)), Mesh(Layout()), 0, 0, n))
        exact, last = float(torch.tensor(x)), abs(x) * 2**-7
        assert abs(narrow.double().mean().item() - exact) < 5 * last / 2 / n**0.5
        assert ((narrow.double() - exact).abs() < last).all()
        assert len(narrow.unique()) == (1 if x == 1.0 else 2)


def test_chances_are_even_and_of_their_own() -> None:
    q, mesh, n = Param("w", (2**16,)), Mesh(Layout()), 2**16
    one = of(q, mesh, 0, 0, n)
    assert int(one.min()) >= 0 and int(one.max()) < 2**16
    counts = torch.bincount(one >> 8, minlength=256).double()
    assert ((counts - 256).square() / 256).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi-squared
    for other in (of(q, mesh, 0, 0, n, STEP + 1), of(Param("v", (n,)), mesh, 0, 0, n), one.roll(1)):
        together = torch.corrcoef(torch.stack([one, other]).double())[0, 1]
        assert abs(together.item()) < 5 / n**0.5


@pytest.mark.parametrize(
    ("rank", "step", "bits"),
    [(0, 1, [61080, 36754, 45396, 55456, 55025, 35028, 30565, 24873, 40873, 803, 65071]),
     (3, 7, [58009, 34206, 8445, 45525, 45402, 33256, 6917, 41702, 56148, 51458, 44342]),
     (3, 2**22 + 1, [42831, 55553, 52578, 58460, 43271, 43500, 37011, 50818, 56669, 59516, 34399])],
)  # fmt: skip
def test_bits_are_those_of_earlier_versions(rank: int, step: int, bits: list[int]) -> None:
    """A run that goes on from a checkpoint of an earlier version ends as it would have."""
    mesh, q = (
        Mesh(Layout(dp=2, tp=2, ep=2)),
        Param("layers.3.experts.down", (4, 6, 8), (Shard(0, "ep"), Shard(2, "tp"))),
    )
    assert of(q, mesh, rank, 20, 12, torch.tensor(float(step), dtype=torch.float64)).tolist()[:11] == bits


@given(
    st.sampled_from([(12, 8), (4, 6, 8), (24,)]),
    st.lists(st.sampled_from(["tp", "ep"]), min_size=0, max_size=2, unique=True),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_layout_rounds_alike(shape: tuple[int, ...], axes: list[str], data: st.DataObject) -> None:
    mesh = Mesh(Layout(dp=2, tp=2, ep=2))
    dims = data.draw(st.permutations(range(len(shape))))
    shards = tuple(Shard(d, axis) for d, axis in zip(dims, axes, strict=False))  # type: ignore[arg-type]
    q = Param("w", shape, shards)
    numel = q.numel(Mesh(Layout()))
    whole = of(Param("w", shape), Mesh(Layout()), 0, 0, numel).view(shape)
    for rank in range(4):
        mine = whole
        for d, (at, n) in enumerate(zip(q.offset(mesh, rank), q.local_shape(mesh), strict=True)):
            mine = mine.narrow(d, at, n)
        begin = data.draw(st.integers(0, mine.numel() - 1))
        count = data.draw(st.integers(1, mine.numel() - begin))
        assert torch.equal(of(q, mesh, rank, begin, count), mine.reshape(-1)[begin : begin + count])


@pytest.mark.parametrize("part", [range(0, 100), range(0, 25), range(50, 75), range(75, 100)], ids=str)
def test_sums_are_narrowed_and_widened_in_their_place(part: range) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    buffer = x.clone()
    with patch.object(update, "SLICE", 8):
        narrow = wire.narrowed(buffer, torch.bfloat16)
        assert narrow.data_ptr() == buffer.data_ptr() and torch.equal(narrow, x.bfloat16())
        wire.widened(buffer, torch.bfloat16, part)
    assert torch.equal(buffer[part.start : part.stop], x.bfloat16().float()[part.start : part.stop])
    assert wire.narrowed(x, torch.float32) is x

"""A rank's part of the initial weights is that of the whole model, and it draws little more than it keeps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import CPU
from penteract.config.layout import Layout
from penteract.config.resolve.presets import TINY, TINY_MOE
from penteract.engine.executor import initial_weights
from penteract.engine.executor.initial_weights import Staging, drawn, initialise, kept_elements, tasks, tiles
from penteract.engine.state import state as training_state
from penteract.engine.state.state import TrainingState, allocate, fill
from penteract.step.program import Program, compile_step


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the parameters of a small model have many."""
    monkeypatch.setattr(initial_weights, "TILE", (24, 40))


def room(p: Program) -> Staging:
    """Memory for all rectangles of a rank at once."""
    return Staging(torch.empty(sum(q.numel(p.mesh) for q in p.params)))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4, "dp": 2}, {"ep": 2, "dp": 2}, {"expert_tp": 2, "tp": 2}])
def test_ranks_keep_what_one_process_has(axes: dict[str, int], zero: int) -> None:
    p = compile_step(TINY_MOE, Layout(), 32)
    alone = allocate(p, CPU)
    initialise(p, alone, 7)
    world = Layout(**axes).world
    for rank in range(world):
        q = compile_step(TINY_MOE, Layout(**axes, zero=zero), 32, rank=rank)
        state = allocate(q, CPU)
        initialise(q, state, 7)
        for part in state.parameter_parts("parameter"):
            begins = part.param.offset(q.mesh, rank)
            mine = alone.parameters[part.param.name]
            for dim, (at, n) in enumerate(zip(begins, part.param.local_shape(q.mesh), strict=True)):
                mine = mine.narrow(dim, at, n)
            assert torch.equal(mine.reshape(-1)[part.begin : part.begin + len(part.values)], part.values)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=3), Layout(dp=2, zero=1, offload_optimizer=True)])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16_pure"])
def test_numbers_are_converted_in_parts(recipe: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is converted at once would need more memory than a step of a small model."""
    p, states = compile_step(TINY, layout, 32, precision=recipe), list[TrainingState]()
    for most in (2**22, 100):
        monkeypatch.setattr(training_state, "AT_ONCE", most)
        states.append(state := allocate(p, CPU))
        pairs = [*drawn(p, 7, kept_elements(p, state), threads=1, staging=room(p))]
        with MadeTensors() as made:
            fill(state, pairs)
    assert made.largest <= 100
    assert made.largest or recipe != "bf16"  # master weights that are split are
    one, other = states
    assert all(torch.equal(x, other.parameters[name]) for name, x in one.parameters.items())
    for kind in ("master", "parameter"):
        parts = zip(one.parameter_parts(kind), other.parameter_parts(kind), strict=True)
        assert all(torch.equal(x.values, y.values) for x, y in parts)


class MadeTensors(TorchDispatchMode):
    """The numbers of the largest tensor that an operation makes; views and what is written in place are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, out.numel())
        return out


def test_threads_draw_the_same() -> None:
    p = compile_step(TINY, Layout(tp=2), 32, rank=1)
    kept = kept_elements(p, allocate(p, CPU))
    one, many = ([(q.name, x) for q, x in drawn(p, 7, kept, threads=n, staging=room(p))] for n in (1, 3))
    assert [name for name, _ in one] == [name for name, _ in many] == [q.name for q in p.params]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one, many, strict=True))


def test_the_deviation_is_the_parameters() -> None:
    p = compile_step(TINY, Layout(), 32)
    for q, x in drawn(p, 7, kept_elements(p, allocate(p, CPU)), threads=2, staging=room(p)):
        if q.scale is None:
            assert (x == q.fill).all()
        elif x.numel() > 10_000:
            assert x.std().item() == pytest.approx(q.scale, rel=0.05)
            assert x.mean().item() == pytest.approx(0, abs=5 * q.scale / x.numel() ** 0.5)


def test_tiles_are_drawn_apart() -> None:
    """No two of them are alike, nor are two parameters or seeds."""
    p, seen = compile_step(TINY, Layout(), 32), dict[tuple[float, ...], str]()
    for seed in (1, 2):
        for q in (q for q in p.params if q.scale is not None):
            x = torch.empty(q.shape)
            for work in tasks(p, q, seed, (0, x.numel()), x):
                work()
            for tile in tiles(q.shape, [0] * x.dim(), q.shape, (0, x.numel())):
                part = x.view(-1, x.shape[-1])[tile.places[0][1]] / q.scale
                key = tuple(part.flatten()[:4].tolist())
                assert key not in seen, (seen[key], q.name)
                seen[key] = q.name


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_kept_is_drawn_and_little_more(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3).map(tuple), label="shape")
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    local = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, offset, strict=True))
    total = torch.Size(local).numel()
    begin = data.draw(st.integers(0, total - 1), label="begin")
    kept = begin, data.draw(st.integers(begin + 1, total), label="end")
    with patch.object(initial_weights, "TILE", data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))):
        found = list(tiles(shape, offset, local, kept))
        every = list(tiles(shape, [0] * len(shape), shape, (0, torch.Size(shape).numel())))
    assert len({tile.name for tile in every}) == len(every)
    whole = torch.zeros(torch.Size(shape[:-1]).numel(), shape[-1], dtype=torch.int64)
    numbers = dict[str, torch.Tensor]()
    for i, tile in enumerate(every):
        numbers[tile.name] = torch.arange(tile.size[0] * tile.size[1]).view(tile.size) + 10_000 * (i + 1)
        for inside, into in tile.places:
            assert not whole[into].any()
            whole[into] = numbers[tile.name][inside]
    assert whole.all()  # every element is in one tile
    want = whole.view(shape)
    for dim, (at, n) in enumerate(zip(offset, local, strict=True)):
        want = want.narrow(dim, at, n)
    made = torch.zeros(local, dtype=torch.int64)
    for tile in found:
        assert tile.places  # something of it is kept
        for inside, into in tile.places:
            assert made.view(-1, local[-1])[into].numel()
            made.view(-1, local[-1])[into] = numbers[tile.name][inside]
    assert torch.equal(made.reshape(-1)[slice(*kept)], want.reshape(-1)[slice(*kept)])


@pytest.mark.parametrize(
    ("offset", "local", "kept"),
    [((0, 5376), (4096, 1792), (0, 7340032)), ((1024, 0), (512, 14336), (0, 7340032)),
     ((0, 0), (4096, 14336), (7340032, 14680064))],
    ids=["columns", "rows", "elements"],
)  # fmt: skip
def test_of_an_eighth_a_rank_draws_a_quarter_at_most(
    offset: tuple[int, int], local: tuple[int, int], kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "TILE", (1024, 512))
    count = sum(torch.Size(tile.size).numel() for tile in tiles((4096, 14336), offset, local, kept))
    assert 7340032 <= count <= 4096 * 14336 // 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("elements", [1, 5_000, 20_000])
def test_rectangles_have_the_same_memory_in_turn(threads: int, elements: int) -> None:
    """Each holds its numbers until the next is asked for, in a block that is smaller than all of them."""
    p = compile_step(TINY_MOE, Layout(), 32)
    kept, block = kept_elements(p, allocate(p, CPU)), torch.empty(elements)
    expected = {q.name: x for q, x in drawn(p, 7, kept, threads=1, staging=room(p))}
    assert sum(x.numel() for x in expected.values()) > elements
    shared = 0
    for q, x in drawn(p, 7, kept, threads=threads, staging=Staging(block)):
        assert torch.equal(x, expected.pop(q.name)), q.name
        shared += x.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        x.fill_(float("nan"))
    assert not expected and (shared > 5 or elements == 1)


@given(st.lists(st.integers(0, 12), max_size=40), st.data())
def test_no_two_rectangles_overlap(sizes: list[int], data: st.DataObject) -> None:
    staging, alive = Staging(torch.arange(10.0)), list[set[float]]()
    for size in sizes:
        while (taken := staging.take(size)) is None:
            assert alive, "memory is refused, and all of it is free"
            staging.give_back()
            alive.pop(0)
        if size <= 10:
            mine: set[float] = set(taken.tolist())
            assert len(mine) == size and not any(mine & other for other in alive)
            alive.append(mine)
        else:
            alive.append(set())
        if data.draw(st.booleans()):
            staging.give_back()
            alive.pop(0)

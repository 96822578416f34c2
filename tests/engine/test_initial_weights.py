"""A rank's part of the initial weights is that of the whole model, and it draws nothing that it does not keep."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from statistics import NormalDist
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from layouts import CPU, Case
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.resolve.presets import TINY, TINY_MOE
from penteract.engine.device.device import Cpu
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.initial_weights import CELLS, Quantiles, elements_of, initialise
from penteract.engine.state import split_master
from penteract.engine.state.set_parameters import fill
from penteract.engine.state.state import TrainingState, allocate
from penteract.ops.params import Param
from penteract.step.program import Program, compile_step
from strategies import cases, fp8_gather_cases

OUTERMOST = 4.281835  # deviations
RECIPES = ["fp64", "fp32", "bf16", "bf16_pure", "fp16"]
SEED, TABLE = 7, Quantiles.on(CPU)


def made(p: Program) -> TrainingState:
    state = allocate(p, CPU)
    initialise(p, state, SEED)
    return state


def numbers(name: str, n: int, seed: int = SEED) -> torch.Tensor:
    """A parameter [n] of deviation 1."""
    p = replace(compile_step(TINY, Layout(), 32), mesh=Mesh(Layout()))
    return elements_of(p, Param(name, (n,), scale=1.0), seed, TABLE)(slice(0, n))


@draws(20, wide=200)
@given(st.one_of(cases(), fp8_gather_cases()), st.sampled_from(RECIPES), st.data())
def test_ranks_keep_what_one_process_has(case: Case, recipe: str, data: st.DataObject) -> None:
    """Whatever cuts a parameter; the fp32 number is in the master weights, and rounded in the parameter."""
    if case.precision == "fp64":
        case = replace(case, precision=recipe)
    whole = made(compile_step(case.model, Layout(), case.sequence_length)).parameters
    for rank in data.draw(st.permutations(range(case.layout.world)))[:3]:
        p = case.compile(rank)
        state = made(p)
        mine = {q.name: rectangle(p, q, whole[q.name]) for q in p.params}
        cut = {q.name for flat in state.flats if flat.cut_parameter is not None for q in flat.bucket.params}
        for name, x in mine.items():
            if name not in cut:
                assert torch.equal(state.parameters[name], rounded(p, x)), name
        for number, q, begin, within in state.shard_parts():
            here, flat = slice(within.start, within.stop), state.flats[number]
            x = mine[q.name].reshape(-1)[begin : begin + len(within)]
            assert torch.equal(flat.own_parameter[here], rounded(p, x)), q.name
            kept = x if p.precision.master else rounded(p, x)
            assert torch.equal(flat.read("master", here, torch.float64), kept.double()), q.name


def rectangle(p: Program, q: Param, whole: torch.Tensor) -> torch.Tensor:
    """What a rank has of a parameter."""
    for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
        whole = whole.narrow(dim, at, n)
    return whole


def rounded(p: Program, x: torch.Tensor) -> torch.Tensor:
    """As the parameters of a policy are."""
    out = torch.empty(x.shape, dtype=dtype_of("parameter", p.precision))
    if p.precision.splits_master:
        split_master.rounded(x.contiguous(), out)
    else:
        out.copy_(x)
    return out


def test_stages_that_share_a_table_have_the_same() -> None:
    case = Case(replace(TINY, tied=True), Layout(pp=2))
    first, last = (made(case.compile(rank)).parameters for rank in (0, 1))
    shared = first.keys() & last.keys()
    assert shared and all(torch.equal(first[name], last[name]) for name in shared)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2, zero=3), Layout(dp=2, zero=1, offload_optimizer=True)])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16_pure"])
def test_how_many_are_drawn_at_once_changes_no_bit(recipe: str, layout: Layout) -> None:
    p, states = compile_step(TINY_MOE, layout, 32, precision=recipe, rank=layout.world - 1), list[TrainingState]()
    for at_once in (2**20, 500):
        with patch.object(Cpu, "at_once", at_once):
            states.append(made(p))
    assert same(*states)


def same(one: TrainingState, other: TrainingState) -> bool:
    pairs = zip(one.flats, other.flats, strict=True)
    return all(torch.equal(x, y) for a, b in pairs for x, y in zip(a.buffers, b.buffers, strict=True)) and all(
        torch.equal(a.master, b.master) for a, b in zip(one.flats, other.flats, strict=True)
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=3), Layout(dp=2, zero=1, offload_optimizer=True)])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16_pure"])
def test_rectangles_of_a_file_fill_the_same(recipe: str, layout: Layout) -> None:
    p = compile_step(TINY, layout, 32, precision=recipe)
    whole, filled = made(compile_step(TINY, Layout(), 32)).parameters, allocate(p, CPU)
    before = {name: x.clone() for name, x in whole.items()}
    fill(filled, ((q, whole[q.name]) for q in p.params))
    assert same(made(p), filled)
    assert all(torch.equal(x, whole[name]) for name, x in before.items())  # what is read stays as it is


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16_pure"])
def test_temporaries_are_few_and_freed(recipe: str) -> None:
    """A table that is drawn at once would need more memory than a step of a small model."""
    p, at_once = compile_step(TINY, Layout(), 32, precision=recipe), 2048
    state = allocate(p, CPU)
    with patch.object(Cpu, "at_once", at_once), patch.object(Quantiles, "on", lambda _: TABLE), Storages() as seen:
        initialise(p, state, SEED)
    assert max(q.numel(p.mesh) for q in p.params) > 5 * at_once
    assert seen.now == 0 and 0 < seen.peak <= 28 * at_once


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}])
def test_each_element_that_is_kept_is_drawn_once(axes: dict[str, int], zero: int) -> None:
    layout = Layout(**axes, zero=zero)
    for rank in range(layout.world):
        p = compile_step(TINY_MOE, layout, 32, rank=rank)
        state = allocate(p, CPU)
        with patch.object(Quantiles, "normal", autospec=True, side_effect=Quantiles.normal) as drawing:
            initialise(p, state, SEED)
        if zero == 3:
            kept = [len(within) for _, q, _, within in state.shard_parts() if q.scale is not None]
        else:
            kept = [q.numel(p.mesh) for q in p.params if q.scale is not None]
        assert sum(len(call.args[1]) for call in drawing.call_args_list) == sum(kept)


def test_what_is_not_drawn_is_filled() -> None:
    p = compile_step(TINY, Layout(), 32)
    filled = [q for q in p.params if q.scale is None]
    state = made(p)
    assert filled and all((state.parameters[q.name] == q.fill).all() for q in filled)


@given(st.integers(0, 2**64), st.text(max_size=20), st.integers(0, 2**14 - 1), st.sampled_from([1.0, 0.02]))
def test_numbers_are_those_of_integers_and_quantiles(seed: int, name: str, row: int, scale: float) -> None:
    """Worked out again in Python's integers, and by the standard library's quantiles."""
    q = Param(name, (2**14, 12), scale=scale)
    index = row * 12 + 5
    z = int.from_bytes(hashlib.sha256(f"{seed}/{name}/initial".encode()).digest()[:8], "little")
    z = (z + index * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    low, high = (quantile(z % 2**14 + side) for side in (0, 1))
    place = (z >> 40) / 2**24
    place += 0.5 if place < 0.5 else -0.5  # the sign is the upper half of a pattern
    p = compile_step(TINY, Layout(), 32)
    found = elements_of(p, q, seed, TABLE)(slice(index, index + 1)).item()
    assert found == pytest.approx(scale * (low + place * (high - low)), abs=1e-6 * scale)


def quantile(cell: int) -> float:
    return {0: -OUTERMOST, CELLS: OUTERMOST}.get(cell) or NormalDist().inv_cdf(cell / CELLS)


def test_a_seeds_weights_are_those_of_earlier_versions() -> None:
    """On every machine, to the last bit."""
    bits = [x.hex() for x in numbers("layers.0.mlp.up", 4).tolist()]
    assert bits == ["0x1.4e132c0000000p+1", "-0x1.5710700000000p-2", "0x1.8ef6ea0000000p+0", "-0x1.4a039c0000000p-1"]


def test_the_table_has_mean_0_and_variance_1() -> None:
    """In which a cell's variance is a twelfth of its width's square."""
    middles, widths = TABLE.middles.double(), TABLE.steps.double() * 2**24
    assert middles.mean().item() == 0
    assert (middles.square() + widths.square() / 12).mean().item() == pytest.approx(1, abs=1e-7)
    assert (middles + widths / 2).max().item() == pytest.approx(OUTERMOST, abs=1e-5)
    assert torch.allclose((middles + widths / 2)[:-1], (middles - widths / 2)[1:], atol=1e-6)


def test_numbers_are_normal() -> None:
    n = 2**22
    x = numbers("w", n).double()
    error = n**-0.5
    assert abs(x.mean().item()) < 4 * error
    assert x.square().mean().item() == pytest.approx(1, abs=4 * 2**0.5 * error)
    assert (x**3).mean().item() == pytest.approx(0, abs=4 * 15**0.5 * error)
    assert (x**4).mean().item() == pytest.approx(3, abs=4 * 96**0.5 * error)
    below = torch.special.ndtr(x.sort().values)
    ranks = torch.arange(n, dtype=torch.float64) / n
    assert (below - ranks).abs().max().item() < 1.95 * error  # Kolmogorov and Smirnov: exceeded once in a thousand
    for far in (2.0, 3.0, 3.5):
        rare = 2 * NormalDist().cdf(-far) * n
        assert (x.abs() > far).sum().item() == pytest.approx(rare, abs=4 * rare**0.5)
    assert 4.2 < x.abs().max().item() < OUTERMOST + 1e-5


def test_numbers_do_not_depend_on_each_other() -> None:
    """Neighbours, rows of 4,096 or 1,000, parameters and seeds: neither they nor their squares are correlated."""
    n = 2**20
    x = numbers("layers.1.wq", n)
    others = [x.roll(1), x.roll(2), x.roll(1000), x.roll(4096), numbers("layers.2.wq", n), numbers("layers.1.wq", n, 8)]
    for other in others:
        for power in (1, 2):
            together = torch.corrcoef(torch.stack([x**power, other**power]).double())[0, 1].item()
            assert abs(together) < 4.5 / n**0.5
    assert len(x.unique()) > 0.95 * n

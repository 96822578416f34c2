"""The recomputation for a budget is the cheapest there is: held to every subset of ops, lowered and priced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penteract.config.hardware import cluster
from penteract.config.layout import EVERY_FUSION, Elementwise, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.recompute import NONE, MemoryBudget
from penteract.errors import BadInput
from penteract.ops.declarations import declaration_of
from penteract.readings.estimator import Estimator
from penteract.readings.price import price
from penteract.readings.recomputation.cheapest import _Solver, within
from penteract.readings.recomputation.choices import Choices
from penteract.step.program import compile_step

MODEL = ModelSpec(layers=3, hidden_size=256, heads=8, kv_heads=8, head_size=32, ffn_size=768, vocab_size=512)
WORDS = ("rms_norm", "linear", "rope", "attention", "add", "swiglu", "cross_entropy")
LAYOUTS = (Layout(), Layout(pp=2, schedule="zb_h1", gradient_accumulation_steps=4))


@cache
def estimator() -> Estimator:
    return Estimator(MODEL, cluster("8xH200"), 256)


@cache
def again(layout: Layout) -> float:
    """Seconds of what a micro-batch makes again on the rank that makes most: read off the walked program, as forward
    calls outside of the forward that are no sums of gradients."""
    most = 0.0
    for r in range(layout.pp):
        p = compile_step(MODEL, layout, 256, rank=Mesh(layout).group("pp", 0)[r], precision="bf16")
        most = max(most, sum(_again(chunk, p.widths, layout) for chunk in p.chunks))
    return most


def _again(chunk: Any, widths: Any, layout: Layout) -> float:
    rates, total = estimator().rates, 0.0
    said = {id(c.site) for instructions in [chunk.actions["Fwd"]] for c in (i.call for i in instructions)}
    for name, instructions in chunk.actions.items():
        for call in (i.call for i in instructions if name != "Fwd"):
            if id(call.site) not in said or call.phase != "forward" or call.site.op_name in NONE:
                continue
            site = call.site
            ins = [tuple(s.shape) for s in site.ins]
            declaration = declaration_of(site, layout)
            beside = 2 * declaration.workspace("forward", ins, site.weights, site.attrs, widths)
            products = declaration.products("forward", ins, site.weights, site.attrs)
            kernels = declaration.traffic("forward", ins, site.weights, site.attrs, widths)
            if products:
                total += sum(map(rates.product, products)) + (rates.moved(beside) if beside else 0.0)
            elif kernels is not None:
                total += sum(k.times * rates.moved(k.moved, k.walked) for k in kernels)
            else:
                total += rates.moved(
                    sum(chunk.specs[r].numel() * widths[chunk.specs[r].role] for r in (*call.ins, *call.outs)) + beside
                )
    return total


@cache
def every_subset(layout: Layout) -> tuple[tuple[float, int, int], ...]:
    """(cost, activations, all bytes) of each uniform subset of ops, by lowering and walking it."""
    found = []
    for n in range(len(WORDS) + 1):
        for op_names in combinations(WORDS, n):
            lay = replace(layout, recompute=(*NONE, *op_names))
            prices = [price(compile_step(MODEL, lay, 256, rank=r, precision="bf16")) for r in Mesh(lay).group("pp", 0)]
            fullest = max(prices, key=lambda p: p.allocated)
            found.append((again(lay), fullest.arena + fullest.routed, fullest.allocated))
    return tuple(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_subset_of_words_is_cheaper(layout: Layout) -> None:
    plain = estimator().estimate(replace(layout, recompute=NONE))
    for fraction in (0.9, 0.75, 0.62):
        chosen = within(estimator(), layout, MemoryBudget(fraction))
        limit = fraction * plain.memory["activations"]
        fits = [cost for cost, activations, _ in every_subset(layout) if activations <= limit]
        assert chosen.estimate.memory["activations"] <= limit
        assert chosen.cost == pytest.approx(again(chosen.layout), rel=1e-9)
        assert chosen.cost <= min(fits, default=float("inf")) * (1 + 1e-9)
        assert not chosen.layout.uniform or chosen.cost == pytest.approx(min(fits), rel=1e-9, abs=1e-15)


@settings(max_examples=2, deadline=None)
@given(st.floats(0.7, 1.0))
@example(0.75)  # the first layers with the cheaper set
def test_no_pair_of_sets_is_cheaper(fraction: float) -> None:
    """Of all that share the layers, the first n with one set and the rest with another."""
    layout = LAYOUTS[0]
    plain = estimator().estimate(replace(layout, recompute=NONE))
    limit = int(plain.allocated - (1 - fraction) * plain.memory["activations"])
    try:
        chosen = within(estimator(), layout, MemoryBudget(allocated=limit))
    except BadInput:
        assert min(total for _, _, total in every_subset(layout)) > limit
        return
    whole = ((uniform(lean)[0], lean, (), MODEL.layers) for lean in SETS)
    parts = ((mixed(lean, rest, n), lean, rest, n) for lean, rest in PAIRS for n in range(1, MODEL.layers))
    held = ((cost, estimator().estimate(shared(*how)).allocated) for cost, *how in sorted([*whole, *parts]))
    best = next(cost for cost, allocated in held if allocated <= limit)
    assert chosen.estimate.allocated <= limit
    assert chosen.cost <= best * (1 + 1e-9)


FEW = ("rms_norm", "linear", "attention", "swiglu")
SETS = [op_names for n in range(len(FEW) + 1) for op_names in combinations(FEW, n)]
PAIRS = [(lean, rest) for lean in SETS for rest in SETS]


def shared(lean: tuple[str, ...], rest: tuple[str, ...], first: int) -> Layout:
    return replace(LAYOUTS[0], recompute=(*NONE, *lean), recompute_first=first, recompute_else=(*NONE, *rest))


@cache
def uniform(op_names: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of what three layers and the ends make again, and of what three layers do."""
    whole = again(replace(LAYOUTS[0], recompute=(*NONE, *op_names)))
    return whole, (whole - again(shared(op_names, (), 2))) * MODEL.layers


def mixed(lean: tuple[str, ...], rest: tuple[str, ...], first: int) -> float:
    """Of the first layers and the ends with one set, and the rest with another."""
    left = (MODEL.layers - first) / MODEL.layers
    return uniform(lean)[0] - left * uniform(lean)[1] + left * uniform(rest)[1]


def test_what_cannot_be_reached_says_what_can() -> None:
    with pytest.raises(BadInput, match="no recomputation keeps so little") as refused:
        within(estimator(), LAYOUTS[0], MemoryBudget(0.01))
    least = float(refused.value.allowed.removeprefix("at least "))
    assert within(estimator(), LAYOUTS[0], MemoryBudget(least)).estimate.allocated > 0
    with pytest.raises(BadInput):
        within(estimator(), LAYOUTS[0], MemoryBudget(least - 0.005))


def test_what_fits_is_left_as_it_is() -> None:
    chosen = within(estimator(), LAYOUTS[0], MemoryBudget(1.0))
    assert chosen.cost == 0
    assert chosen.layout == LAYOUTS[0]
    assert "nothing in every layer" in chosen.text()


EXPERTS = replace(MODEL, layers=4, moe=MoESpec(experts=4, top_k=2, ffn_size=256, dense_layers=(0,)))


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, gradient_accumulation_steps=4)], ids=str)
def test_a_bound_lies_below_the_price(layout: Layout) -> None:
    """Of one set and of two, at a limit of one byte less than the price and at the price: refused above it alone."""
    some = Estimator(EXPERTS, cluster("8xH200"), 256)
    plain = some.estimate(replace(layout, recompute=NONE))
    solver = _Solver.of(some, layout, plain, 0)
    sets = solver.choices.frontier
    assert len(sets) > 20
    for lean, rest in [
        *zip(sets, sets, strict=True),
        *zip(sets, sets[::-1], strict=True),
        *zip(sets, sets[7:], strict=False),
    ]:
        for first in range(1, solver.depth):
            lay = solver._shared(lean, rest, first) if lean is not rest else replace(layout, recompute=lean.op_names)
            price = some.estimate(lay).allocated
            ranks = tuple(replace(rank, room=rank.room + price) for rank in solver.ranks)
            assert replace(solver, ranks=ranks).may_fit(lean, rest, first), (lean.op_names, rest.op_names, first)


@pytest.mark.parametrize("fraction", [0.9])
def test_no_pair_of_sets_of_experts_is_cheaper(fraction: float) -> None:
    """All pairs of sets that none betters, all numbers of layers: priced one by one, without a bound."""
    some = Estimator(EXPERTS, cluster("8xH200"), 256)
    chosen = within(some, Layout(), MemoryBudget(fraction))
    plain = chosen.plain
    limit = plain.allocated - (1 - fraction) * plain.memory["activations"]
    solver = _Solver.of(some, Layout(), plain, limit)
    every = [(solver.cost(a, b, n), a, b, n) for a in solver.choices.frontier for b in solver.choices.frontier
             for n in range(1, solver.depth)]  # fmt: skip
    alone = [(solver.cost(c, c, solver.depth), c, c, solver.depth) for c in solver.choices.every]
    for cost, a, b, n in sorted([*every, *alone], key=lambda item: item[0]):
        if cost >= chosen.cost * (1 - 1e-9):
            break
        lay = replace(Layout(), recompute=a.op_names) if a is b else solver._shared(a, b, n)
        assert some.estimate(lay).allocated > limit, (a.op_names, b.op_names, n)


@pytest.mark.parametrize("elementwise", ["reference", "triton"])
def test_a_result_that_a_call_makes_again_costs_what_the_step_takes_more(elementwise: Elementwise) -> None:
    """Of SwiGLU's result under the fusion "glu", which the call of both input gradients makes, too."""
    plain = Layout(fuse=EVERY_FUSION, elementwise=elementwise)
    wide = Estimator(MODEL, cluster("1xH200"), 8192)  # a step that is longer than its launches
    again = plain.put(recompute=(*NONE, "swiglu"))
    before, after = (wide.time(wide.estimate(lay)).seconds for lay in (plain, again))
    kinds = tuple(dict.fromkeys(k for chain in wide.composer.assignment(plain).by_rank[0] for k, _ in chain))
    costs = {frozenset(c.op_names): sum(c.cost) for c in Choices.of(wide, kinds, plain).every}
    assert 0 < after - before == pytest.approx(MODEL.layers * costs[frozenset(again.recompute)], rel=1e-6)

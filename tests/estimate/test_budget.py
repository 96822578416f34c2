"""The recomputation for a budget is the cheapest there is: held to every subset of words, lowered and priced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.errors import BadInput
from penteract.estimate.budget import within
from penteract.estimate.price import price
from penteract.estimate.quote import Quoter
from penteract.ops.bodies import body_of
from penteract.spec.hardware import cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.spec.recompute import NONE, Budget
from penteract.step.program import compile_step

MODEL = ModelSpec(layers=3, hidden_size=256, heads=8, kv_heads=8, head_size=32, ffn_size=768, vocab_size=512)
WORDS = ("rms_norm", "linear", "rope", "attention", "add", "swiglu")
LAYOUTS = (Layout(), Layout(pp=2, schedule="zb_h1", gradient_accumulation_steps=4))


@cache
def quoter() -> Quoter:
    return Quoter(MODEL, cluster("8xH200"), 256)


def again(layout: Layout) -> float:
    """Seconds of what a micro-batch makes again on the rank that makes most: read off the walked program, as forward
    calls outside of the forward that are no sums of gradients."""
    most = 0.0
    for r in range(layout.pp):
        p = compile_step(MODEL, layout, 256, rank=Mesh(layout).group("pp", 0)[r], precision="bf16")
        most = max(most, sum(_again(chunk, p.widths, layout) for chunk in p.chunks))
    return most


def _again(chunk: Any, widths: Any, layout: Layout) -> float:
    rates, total = quoter().rates, 0.0
    said = {id(c.site) for instructions in [chunk.actions["Fwd"]] for c in (i.call for i in instructions)}
    for name, instructions in chunk.actions.items():
        for call in (i.call for i in instructions if name != "Fwd"):
            if id(call.site) not in said or call.phase != "forward" or call.site.word in NONE:
                continue
            site = call.site
            ins = [tuple(s.shape) for s in site.ins]
            body = body_of(site.word, layout)
            beside = 2 * body.workspace("forward", ins, site.weights, site.attrs, widths)
            products = body.products("forward", ins, site.weights, site.attrs)
            if products:
                total += sum(map(rates.product, products)) + (rates.moved(beside) if beside else 0.0)
            else:
                total += rates.moved(
                    sum(chunk.specs[r].numel() * widths[chunk.specs[r].role] for r in (*call.ins, *call.outs)) + beside
                )
    return total


@cache
def every_subset(layout: Layout) -> tuple[tuple[float, int, int], ...]:
    """(cost, activations, all bytes) of each uniform subset of words, by lowering and walking it."""
    found = []
    for n in range(len(WORDS) + 1):
        for words in combinations(WORDS, n):
            lay = replace(layout, remake=(*NONE, *words))
            prices = [price(compile_step(MODEL, lay, 256, rank=r, precision="bf16")) for r in Mesh(lay).group("pp", 0)]
            fullest = max(prices, key=lambda p: p.allocated)
            found.append((again(lay), fullest.arena + fullest.routed, fullest.allocated))
    return tuple(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_subset_of_words_is_cheaper(layout: Layout) -> None:
    plain = quoter().quote(replace(layout, remake=NONE))
    for fraction in (0.9, 0.7, 0.5):
        chosen = within(quoter(), layout, Budget(fraction))
        limit = fraction * plain.memory["activations"]
        fits = [cost for cost, activations, _ in every_subset(layout) if activations <= limit]
        assert chosen.quote.memory["activations"] <= limit
        assert chosen.cost == pytest.approx(again(chosen.layout), rel=1e-9)
        assert chosen.cost <= min(fits, default=float("inf")) * (1 + 1e-9)
        if chosen.layout.uniform:
            assert chosen.cost == pytest.approx(min(fits), rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(st.floats(0.3, 1.0))
def test_no_pair_of_sets_is_cheaper(fraction: float) -> None:
    """Of all that share the layers, the first n with one set and the rest with another."""
    layout = LAYOUTS[0]
    plain = quoter().quote(replace(layout, remake=NONE))
    limit = int(plain.allocated - (1 - fraction) * plain.memory["activations"])
    try:
        chosen = within(quoter(), layout, Budget(allocated=limit))
    except BadInput:
        assert min(total for _, _, total in every_subset(layout)) > limit
        return
    best = float("inf")
    for lean, rest in PAIRS:
        for first in range(MODEL.layers + 1):
            cost = (first * costs()[lean] + (MODEL.layers - first) * costs()[rest]) / MODEL.layers
            if cost < best:
                lay = replace(layout, remake=(*NONE, *lean), remake_first=first, remake_else=(*NONE, *rest))
                lay = lay if first else replace(lay, remake=lay.remake_else)
                best = cost if quoter().quote(lay).allocated <= limit else best
    assert chosen.quote.allocated <= limit
    assert chosen.cost == pytest.approx(best, rel=1e-9, abs=1e-15)


SETS = [words for n in range(len(WORDS) + 1) for words in combinations(WORDS, n)]
PAIRS = [(lean, rest) for lean in SETS for rest in SETS]


@cache
def costs() -> dict[tuple[str, ...], float]:
    return {words: again(replace(LAYOUTS[0], remake=(*NONE, *words))) for words in SETS}


def test_what_cannot_be_reached_says_what_can() -> None:
    with pytest.raises(BadInput, match="no recomputation keeps so little") as refused:
        within(quoter(), LAYOUTS[0], Budget(0.01))
    least = float(refused.value.allowed.removeprefix("at least "))
    assert within(quoter(), LAYOUTS[0], Budget(least)).quote.allocated > 0
    with pytest.raises(BadInput):
        within(quoter(), LAYOUTS[0], Budget(least - 0.005))


def test_what_fits_is_left_as_it_is() -> None:
    chosen = within(quoter(), LAYOUTS[0], Budget(1.0))
    assert chosen.cost == 0
    assert chosen.layout == LAYOUTS[0]
    assert "nothing in every layer" in chosen.text()

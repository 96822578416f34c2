"""What the planner takes for granted of quotes, asked of real ones; and its answer against simulating everything."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from penteract.plan.ask import RECOMPUTE, Ask
from penteract.plan.explain import explain
from penteract.plan.plan import Plan, exact, plan_layouts, plan_one, quoter
from penteract.plan.report import as_dict, utilisation
from penteract.plan.search import Timed
from penteract.plan.space import Family, Space
from penteract.spec.hardware import cluster
from penteract.spec.model import ModelSpec
from penteract.spec.presets import TINY, TINY_MOE

ASKS = {
    "dense": Ask(model=TINY, cluster=cluster("4xH200"), sequence_length=256, global_batch_size=16),
    "experts": Ask(model=TINY_MOE, cluster=cluster("4xH100"), sequence_length=256, global_batch_size=8),
}


@cache
def drawn(name: str, n: int) -> list[Family]:
    families = [f for f in Space(ASKS[name]).families(Counter()) if len(f) > 1]
    return random.Random(7).sample(families, n)


@pytest.mark.parametrize("name", ASKS)
def test_a_larger_micro_batch_needs_no_less(name: str) -> None:
    prices = quoter(ASKS[name])
    for family in drawn(name, 40):
        sizes = [prices.quote(lay).allocated for lay in family]
        assert sizes == sorted(sizes), family[0]


@pytest.mark.parametrize("name", ASKS)
def test_recomputing_keeps_no_more_and_takes_no_less(name: str) -> None:
    prices = quoter(ASKS[name])
    for family in drawn(name, 30):
        plain, full = (replace(family[0], remake=RECOMPUTE[kind]) for kind in ("none", "full"))
        a, b = prices.quote(plain), prices.quote(full)
        assert b.allocated <= a.allocated, plain
        assert b.at_least >= a.at_least * (1 - 1e-9), plain
        assert prices.time(b).seconds >= prices.time(a).seconds * (1 - 1e-9), plain


@pytest.mark.parametrize("name", ASKS)
def test_bounds_are_below_and_parts_add_up(name: str) -> None:
    prices = quoter(ASKS[name])
    for family in drawn(name, 40):
        quote = prices.quote(family[-1])
        time = prices.time(quote)
        assert quote.at_least <= time.seconds * (1 + 1e-9), quote.layout
        assert sum(time.parts.values()) == pytest.approx(time.seconds)
        assert sum(quote.memory.values()) == quote.allocated == max(quote.by_stage)


def test_the_best_are_those_of_simulating_everything() -> None:
    ask = replace(ASKS["dense"], pins={"pp": (1, 2), "cp": (1, 2), "micro_batch_size": (1, 4)})
    found, prices = plan_layouts(ask, quoter, top=5), quoter(ask)
    legal = [lay for family in Space(ask).families(Counter()) for lay in family]
    everything = sorted((Timed(q, prices.time(q)) for q in map(prices.quote, legal)), key=lambda t: t.order)
    everything = [t for t in everything if t.layout.remake == RECOMPUTE["none"]]  # as all of them fit
    assert [t.layout for t in found.layouts] == [t.layout for t in everything[:5]]
    assert found.counts.fit == len(legal)
    assert found.counts.enumerated == found.counts.fit + sum(found.counts.refused.values())
    assert found.counts.simulated < len(legal)


def small(memory: float, model: ModelSpec = TINY) -> Plan:
    """The dense question on GPUs of so many GiB."""
    ask = ASKS["dense"]
    ask = replace(ask, model=model, cluster=replace(ask.cluster, memory_gib=memory), pins={"cp": (1,), "pp": (1, 2)})
    return plan_layouts(ask, quoter)


def test_less_memory_leaves_fewer() -> None:
    plenty = small(139.8)
    tight = small(0.0125)  # 11.8 MiB usable: less than any dp = 4 needs
    assert tight.counts.fit < plenty.counts.fit == plenty.counts.enumerated - sum(plenty.counts.refused.values())
    assert tight.best.time.seconds >= plenty.best.time.seconds
    assert all(tight.fits(t.quote) for t in tight.layouts)
    told = explain(tight, tight.best)
    assert " needs " in told.fit
    assert told.fit.endswith(".")


def test_moves_lead_from_the_simplest_to_the_best() -> None:
    found = small(0.03)
    moves = explain(found, found.best).moves
    assert moves[-1].after.layout == found.best.layout
    assert all(a.after is b.before for a, b in pairwise(moves))


def test_nothing_fits_and_what_would() -> None:
    found = small(0.005)
    assert (found.counts.fit, found.layouts) == (0, ())
    assert found.misses[0].allocated == min(q.allocated for q in found.misses) > found.ask.usable
    assert found.larger is not None
    larger, quote = found.larger
    assert larger.gpus in (8, 16, 32, 64, 128, 256)
    assert quote.layout.world == larger.gpus
    assert quote.allocated <= found.ask.usable


def test_one_layout_is_priced_as_in_the_search() -> None:
    ask = ASKS["dense"]
    best = plan_layouts(replace(ask, pins={"pp": (1,), "cp": (1,), "micro_batch_size": (2,)}), quoter).best
    axes = {"tp": (best.layout.tp,), "micro_batch_size": (2,), "zero": (best.layout.zero,)}
    alone = plan_one(ask, axes, quoter)
    assert exact(ask, axes) == best.layout
    assert (alone.best.quote, alone.best.time) == (best.quote, best.time)


def test_utilisation_counts_what_is_computed_again() -> None:
    found = plan_one(ASKS["dense"], {"recompute": ("full",)}, quoter)
    used = utilisation(found, found.best)
    assert used.mfu and used.mfu_causal and used.hfu
    assert used.mfu_causal < used.mfu < used.hfu < used.mfu * 4 / 3
    plain = plan_one(ASKS["dense"], {}, quoter)
    used = utilisation(plain, plain.best)
    assert used.hfu == used.mfu
    told = as_dict(plain)["layouts"][0]
    assert told["tokens_per_s_per_gpu"] == 16 * 256 / told["time"]["step_s"] / 4

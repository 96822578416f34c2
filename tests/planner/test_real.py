"""What the planner takes for granted of estimates, asked of real ones; and its answer against simulating everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from draws import more
from penteract.config import catalog
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import Fp8, usual
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY
from penteract.errors import BadInput
from penteract.planner.ask import RECOMPUTE, Ask
from penteract.planner.plan import Plan, estimator, exact, plan_layouts, plan_one
from penteract.planner.report.as_json import as_dict, utilisation
from penteract.planner.report.explain import explain
from penteract.planner.search.between import recomputations
from penteract.planner.search.grow import larger_cluster
from penteract.planner.search.priced import TOO_LARGE, unfit
from penteract.planner.search.rows import Branch
from penteract.planner.space.layouts import Space
from penteract.step.program import compile_step
from planner.every_layout import ASKS, check_plan

SEEDS = (0, 1, 2, 3, 4, 8)  # 5, 7 and 9 simulate a thousand layouts each, and 6 nearly as many
SPREAD = 50  # rows of each question, evenly, of which some have bounds that say something
ROWS = more(4, wide=50)  # of each question that bounds are asked of


@cache
def drawn(name: str, n: int) -> list[tuple[Layout, ...]]:
    runs = [run for family in Space(ASKS[name]).families(Counter()) for run in family.runs() if len(run) > 1]
    return Random(7).sample(runs, n)


@pytest.mark.wide(15)
@pytest.mark.parametrize("name", ASKS)
def test_a_larger_micro_batch_needs_no_less(name: str) -> None:
    prices = estimator(ASKS[name])
    for family in drawn(name, more(15, wide=100)):
        sizes = [prices.estimate(lay).allocated for lay in family]
        assert sizes == sorted(sizes), family[0]


@pytest.mark.wide(12)
@pytest.mark.parametrize("name", ASKS)
def test_recomputing_keeps_no_more_and_takes_no_less(name: str) -> None:
    prices = estimator(ASKS[name])
    for family in drawn(name, more(12, wide=75)):
        plain, full = (replace(family[0], recompute=RECOMPUTE[kind]) for kind in ("none", "full"))
        a, b = prices.estimate(plain), prices.estimate(full)
        assert b.allocated <= a.allocated or plain.schedule == "zb_h1", plain
        assert b.at_least >= a.at_least * (1 - 1e-9), plain
        assert prices.time(b).seconds >= prices.time(a).seconds * (1 - 1e-9), plain


@pytest.mark.wide(8)
@pytest.mark.parametrize("name", ASKS)
def test_recomputing_some_takes_no_less_than_none_and_no_more_than_all(name: str) -> None:
    """Some ops of all layers and all ops of some layers have no order: where launches take the time, the latter may be
    fewer."""
    prices = estimator(ASKS[name])
    for run in drawn(name, more(8, wide=50)):
        chain = [replace(run[0], recompute=RECOMPUTE["none"])]
        chain += [replace(run[0], **fields) for fields in recomputations(ASKS[name].model)]
        chain.append(replace(run[0], recompute=RECOMPUTE["full"]))
        seconds = [prices.time(prices.estimate(lay)).seconds for lay in chain]
        none, *some, whole = seconds
        assert all(none * (1 - 1e-9) <= s <= whole * (1 + 1e-9) for s in some), (run[0], seconds)


@pytest.mark.wide(20)
@pytest.mark.parametrize("name", ASKS)
def test_a_floor_is_below_what_is_allocated(name: str) -> None:
    prices, shares = estimator(ASKS[name]), list[float]()
    for run in drawn(name, more(20, wide=150)):
        for lay in (run[0], run[-1], replace(run[-1], recompute=("tp_all_gather", "swiglu"))):
            estimate = prices.estimate(lay)
            shares.append(prices.floor(lay) / estimate.allocated)
            assert shares[-1] <= 1, lay
            assert estimate.at_least <= prices.time(estimate).seconds * (1 + 1e-9), lay
    assert sorted(shares)[len(shares) // 2] > 0.4  # half of them: it says something


OFFLOADED = {"offload": ("swiglu",)}
LARGER = Ask(model=catalog.model("llama-3.2-1b"), cluster=cluster("4xH200"), sequence_length=2048,
             global_batch_size=32)  # fmt: skip
BOUNDED = {
    "dense": ASKS["dense"],
    "experts": ASKS["experts"],
    "nodes": replace(ASKS["experts"], cluster=cluster("2x8xH100"), global_batch_size=32),
    "ahead": replace(ASKS["dense"], model=replace(TINY, mtp_layers=1), sequence_length=96),
    "torch's kernels": replace(ASKS["dense"], packages=frozenset()),
    "offloaded": replace(LARGER, pins=OFFLOADED),
    "nothing": replace(ASKS["dense"], pins={"recompute": ("nothing", "none", "swiglu", "full")}),
    "rowwise": replace(ASKS["dense"], precision=RECIPES["fp8_rowwise"], sequence_length=128),
    "experts rowwise": replace(
        ASKS["experts"],
        precision=replace(RECIPES["fp8_rowwise"], fp8=replace(usual("rowwise"), experts=True)),
        sequence_length=128,
    ),
    "kernels": replace(
        ASKS["dense"],
        precision=RECIPES["fp8_rowwise"],
        sequence_length=128,
        pins={"elementwise": ("reference", "triton")},
    ),
    "losses": replace(ASKS["dense"], pins={"loss": ("chunked", "reference"), "loss_chunk": (0, 32)}),
}


def test_every_second_layer_of_stages_of_one_is_each() -> None:
    """So a search need not try it there."""
    prices = estimator(ASKS["dense"])
    full = Layout(
        dp=2, pp=2, schedule="interleaved", vpp=TINY.layers // 2, gradient_accumulation_steps=2, recompute=("*",)
    )
    second = replace(full, recompute_every=2, recompute_else=RECOMPUTE["none"])
    one, other = map(prices.estimate, (full, second))
    assert one.by_pp_rank == other.by_pp_rank and prices.time(one) == prices.time(other)
    longer = replace(full, schedule="1f1b", vpp=1), replace(second, schedule="1f1b", vpp=1)
    assert prices.estimate(longer[0]).allocated != prices.estimate(longer[1]).allocated


@pytest.mark.wide(ROWS)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_lie_one_below_the_other(name: str) -> None:
    """Of a family, that of all its rows; of a row, rough and its own; of each layout its estimate's, that of a rank
    alone, and its simulated time; those by played passes and of a run's first step lie below the time, too."""
    ask = BOUNDED[name]
    prices = estimator(ask)
    rows = [row for family in Space(ask).families(Counter()) for row in Branch(family, prices).rows()]
    for row in Random(5).sample(rows, min(ROWS, len(rows))):
        layouts = [lay for lay in map(row.layout, row.memories) if not unfit(prices, lay)]
        rough, own = row.rough_bound(ask.global_batch_size), row.bound()
        of_family = [row.branch.rough_bound(ask.global_batch_size, mesh) for mesh in row.branch.meshes]
        whole = max(of_family)
        for lay in layouts:
            estimate = prices.estimate(lay)
            first, seconds = prices.first(estimate), prices.time(estimate).seconds
            played = prices.bounds.played(lay) if lay.pp > 1 else 0.0  # also where it costs more than a search spends
            chain = [whole, rough, own, estimate.at_least, prices.closer(estimate), seconds]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(chain)), (lay, chain)
            assert played <= first * (1 + 1e-9), (lay, played, first)
            assert estimate.at_least <= prices.played(estimate) <= seconds * (1 + 1e-9), (lay, seconds)
            assert first <= seconds * (1 + 1e-9), (lay, first, seconds)
    # They say something, though launches are most of so small a step; with the calls of FlashAttention-4 the most.
    some = rows[:: max(1, len(rows) // SPREAD)]
    assert (
        max(row.branch.rough_bound(ask.global_batch_size, row.branch.meshes[-1]) / row.bound() for row in some) > 0.09
    )


@pytest.mark.parametrize("pins", [OFFLOADED, {"tp": (4,), "recompute": ("none", "nothing", "full")}], ids=str)
def test_a_pin_more_finds_nothing_better(pins: dict[str, tuple[Any, ...]]) -> None:
    """As the answer without it was the best of all."""
    ask = replace(LARGER, pins=pins)
    every = plan_layouts(ask, estimator, top=1).best.time.seconds
    for recompute in pins.get("recompute", ("none", "full")):
        some = plan_layouts(replace(ask, pins={**pins, "recompute": (recompute,)}), estimator, top=1)
        assert some.best.time.seconds >= every * 0.9989, recompute  # which counts to four digits


def test_a_number_beyond_the_top_is_found() -> None:
    found = plan_layouts(replace(ASKS["dense"], pins={"pp": (1,)}), estimator, top=1, number=3)
    assert found.number(3).time.seconds >= found.best.time.seconds


@pytest.mark.wide(15)
@pytest.mark.parametrize("name", ASKS)
def test_bounds_are_below_and_parts_add_up(name: str) -> None:
    prices = estimator(ASKS[name])
    for family in drawn(name, more(15, wide=100)):
        estimate = prices.estimate(family[-1])
        time = prices.time(estimate)
        assert estimate.at_least <= time.seconds * (1 + 1e-9), estimate.layout
        assert sum(time.parts.values()) == pytest.approx(time.seconds)
        assert sum(estimate.memory.values()) == estimate.allocated == max(estimate.by_pp_rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_that_of_simulating_every_layout(seed: int) -> None:
    """`make test-all` asks more questions (`tests/planned_long.py`, which writes a record)."""
    check_plan(seed)


def small(memory: float, model: ModelSpec = TINY) -> Plan:
    """The dense question on GPUs of so many GiB."""
    ask = ASKS["dense"]
    ask = replace(ask, model=model, cluster=replace(ask.cluster, memory_gib=memory), pins={"cp": (1,), "pp": (1, 2)})
    return plan_layouts(ask, estimator)


def test_less_memory_leaves_fewer() -> None:
    plenty = small(139.8)
    tight = small(0.0125)  # 11.8 MiB usable: less than any dp = 4 needs
    assert plenty.counts.fit == plenty.counts.enumerated - sum(plenty.counts.refused.values())
    assert tight.counts.refused[TOO_LARGE] > plenty.counts.refused.get(TOO_LARGE, 0)
    assert tight.best.time.seconds >= plenty.best.time.seconds
    assert all(tight.fits(t.estimate) for t in tight.layouts)
    told = explain(tight, tight.best)
    assert " needs " in told.fit
    assert told.fit.endswith(".")


def test_moves_lead_from_the_simplest_to_the_best() -> None:
    found = small(0.03)
    moves = explain(found, found.best).moves
    assert moves[-1].after.layout == found.best.layout
    assert all(a.after is b.before for a, b in pairwise(moves))


def test_nothing_fits_and_what_would() -> None:
    found = small(0.004)
    assert (found.counts.fit, found.layouts) == (0, ())
    assert found.misses()[0].allocated > found.ask.usable
    prices = estimator(found.ask)
    assert found.misses()[0].allocated == min(prices.estimate(m.layout).allocated for m in found.missed)
    assert found.larger is not None
    larger, estimate = found.larger
    assert estimate.layout.world == larger.gpus
    assert estimate.allocated <= found.ask.usable


def test_one_layout_is_priced_as_in_the_search() -> None:
    ask = ASKS["dense"]
    best = plan_layouts(replace(ask, pins={"pp": (1,), "cp": (1,), "micro_batch_size": (2,)}), estimator).best
    settings = {"tp": (best.layout.tp,), "micro_batch_size": (2,), "zero": (best.layout.zero,)}
    alone = plan_one(ask, settings, estimator)
    assert exact(ask, settings) == best.layout
    assert (alone.best.estimate, alone.best.time) == (best.estimate, best.time)


def test_what_the_engine_would_not_gather_in_fp8_is_refused_and_counted() -> None:
    fp8 = replace(RECIPES["fp8_tensorwise"], fp8=Fp8(kind="tensorwise", gather=True))
    pins = {"pp": (1, 2), "cp": (1,), "micro_batch_size": (1, 4)}
    ask = replace(ASKS["dense"], precision=fp8, pins=pins)
    found = plan_layouts(ask, estimator)
    assert found.layouts and {t.layout.zero for t in found.layouts} == {3}
    for t in found.layouts:
        compile_step(ask.model, t.layout, ask.sequence_length, precision=fp8)
    counts = found.counts
    why = "weights are gathered in FP8 only where ZeRO 3 shards them"
    assert counts.refused[why] > 0
    assert counts.enumerated == counts.fit + sum(counts.refused.values())
    with pytest.raises(BadInput, match="found zero = 1 / allowed zero = 3"):
        plan_one(ask, {"zero": (1,)}, estimator)
    tight = plan_layouts(replace(ask, cluster=replace(ask.cluster, memory_gib=0.005)), estimator)
    assert {miss.layout.zero for miss in tight.missed} == {3}
    assert tight.larger is not None
    compile_step(ask.model, tight.larger[1].layout, ask.sequence_length, precision=fp8)


def test_utilisation_counts_what_is_computed_again() -> None:
    found = plan_one(ASKS["dense"], {"recompute": ("full",)}, estimator)
    used = utilisation(found, found.best)
    assert used.mfu and used.mfu_causal and used.hfu
    assert used.mfu_causal < used.mfu < used.hfu < used.mfu * 4 / 3
    plain = plan_one(ASKS["dense"], {}, estimator)
    used = utilisation(plain, plain.best)
    assert used.hfu == used.mfu
    told = as_dict(plain)["layouts"][0]
    assert told["tokens_per_s_per_gpu"] == 16 * 256 / told["time"]["step_s"] / 4


@pytest.mark.parametrize("gpus", [8, 16, 24])
def test_the_larger_cluster_is_the_smallest_that_fits(gpus: int) -> None:
    """From wherever one starts: one node fewer does not fit, or divides neither the batch nor the layers."""
    ask = replace(ASKS["dense"], cluster=replace(cluster(f"{gpus}xH200"), memory_gib=0.0026))
    found = larger_cluster(ask, estimator)
    assert found is not None
    larger, estimate = found
    assert estimate.layout.world == larger.gpus and estimate.allocated <= ask.usable
    for fewer in range(gpus + 8, larger.gpus, 8):
        smaller = replace(ask, cluster=replace(cluster(f"{fewer}xH200"), memory_gib=0.0026))
        assert not plan_layouts(smaller, estimator).layouts, fewer

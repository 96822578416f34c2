"""A planner's answer against simulating every layout: of drawn questions, of a few hundred layouts each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY, TINY_MOE
from penteract.parallel.pipeline import stage_layers
from penteract.planner.ask import RECOMPUTE, Ask
from penteract.planner.plan import estimator, plan_layouts
from penteract.planner.search.best import Timed, four_digits
from penteract.planner.search.between import recomputations
from penteract.planner.search.rows import lower_stages
from penteract.planner.space.layouts import Space
from penteract.readings.estimator import Estimator

ASKS = {
    "dense": Ask(model=TINY, cluster=cluster("4xH200"), sequence_length=256, global_batch_size=16),
    "experts": Ask(model=TINY_MOE, cluster=cluster("4xH100"), sequence_length=256, global_batch_size=8),
}


def drawn_question(seed: int) -> Ask:
    """Of a few hundred layouts, with memory that leaves room for some of them."""
    random = Random(seed)
    ask = ASKS[random.choice(sorted(ASKS))]
    pins: dict[str, tuple[Any, ...]] = {
            "pp": random.choice(((1,), (2,), (1, 2))), "cp": random.choice(((1,), (1, 2))),
            "micro_batch_size": random.choice(((1, 2), (2, 4), (1, 4)))}  # fmt: skip
    if random.random() < 0.5:
        pins["schedule"] = random.choice((("1f1b",), ("zb_h1",), ("1f1b", "zb_h1")))
    also = (RECIPES["bf16_pure"],) if random.random() < 0.3 else ()
    tight = replace(ask.cluster, memory_gib=random.choice((0.011, 0.0145, 0.02, 0.04, 80)))
    return replace(ask, pins=pins, also=also, cluster=tight)


def in_order(some: Sequence[Timed]) -> list[tuple[object, ...]]:
    """Layouts that are equal in all by which a plan orders them may come in any order."""
    return sorted((t.order, repr((t.layout, t.estimate.precision))) for t in some)


def check_plan(seed: int) -> int:
    """None is faster that fits, but for those that recompute, or cut, more than they need to and are no faster."""
    ask, k = drawn_question(seed), 6
    found = plan_layouts(ask, estimator, top=k)
    listed, tried, every = list[Timed](), 0, 0
    for one in ask.each:
        prices, fits = estimator(one), dict[Layout, Timed]()
        refused = Counter[str]()
        legal = [lay for family in Space(one).families(refused) for run in family.runs() for lay in run]
        some, chosen = recomputations(one.model), dict[Layout, list[Layout]]()
        tried += len(legal) + refused.total()

        def fit(lay: Layout, prices: Estimator = prices, fits: dict[Layout, Timed] = fits) -> bool:
            if lay not in fits and (estimate := prices.estimate(lay)).allocated <= ask.usable:
                fits[lay] = Timed(estimate, prices.time(estimate))
            return lay in fits

        for lay in legal:
            plain, split = replace(lay, recompute=RECOMPUTE["none"]), lay.schedule == "zb_h1"
            if lay == plain:
                if fit(lay):
                    chosen[lay] = [lay]
                continue
            if fit(plain) and not split:
                continue
            if fit(lay):
                chosen[lay] = [plain, lay]
            if not fit(plain) and (fit(lay) or split):  # with a split backward, all of it may keep more than some
                stages = stage_layers(one.model.layers, lay)  # every second layer of single ones is each
                single = max(map(len, stages)) == 1 and not one.model.mtp_layers
                partly = [replace(lay, **f) for f in some if not (single and "recompute_every" in f)]
                if first := next(filter(fit, partly), None):
                    chosen[first] = partly[: partly.index(first) + 1]
        for lay, simpler in chosen.items():
            lower = (replace(less, zero=z, reduce_scatter_once=w, reshard_after_step=g) for less in simpler
                     for z, w, g in lower_stages(lay.zero, lay.reduce_scatter_once,
                     lay.reshard_after_step))  # fmt: skip
            seconds = four_digits(fits[lay].time.seconds)
            if not any(low in fits and four_digits(fits[low].time.seconds) <= seconds for low in lower):
                listed.append(fits[lay])
        every += len(fits)
    best = sorted(listed, key=lambda t: t.order)[:k]
    assert [t.order for t in found.layouts] == [t.order for t in best]
    assert in_order(found.layouts) == in_order(best)
    c = found.counts
    assert c.enumerated == c.fit + sum(c.refused.values()) == tried + c.between.tried
    assert c.simulated <= max(every, 20)  # of so few, it may also simulate some that recompute more than they need
    return every

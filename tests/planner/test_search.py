"""Branch and bound against simulating everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from functools import cache
from math import inf
from zlib import crc32

import pytest

from penteract.config.hardware import Cluster
from penteract.config.layout import Layout
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY
from penteract.planner.ask import Ask
from penteract.planner.search.best import Search, Timed, four_digits
from penteract.planner.search.frontier import Frontier
from penteract.planner.search.priced import NEEDLESS, SMALLER_TOO_LARGE, TOO_LARGE, Priced
from penteract.planner.space.effort import effort
from penteract.planner.space.layouts import Space
from planner.fake import GIB, FakeEstimator

BF16 = RECIPES["bf16"]
ASK = Ask(model=TINY, cluster=Cluster(gpus=8, memory_gib=80), sequence_length=256, global_batch_size=16)
NO_RECOMPUTATION = replace(ASK, pins={"recompute": ("none",)})


@cache
def slack(lay: Layout) -> float:
    """Anything from 0 to a twentieth of a second, the same for the same layout."""
    return crc32(repr(astuple(lay)).encode()) % 1000 / 20000


def frontier(estimator: FakeEstimator, usable: int, ask: Ask = ASK) -> Frontier:
    found = Frontier(Priced(usable), ask.global_batch_size)
    found.add(Space(ask).families(found.found.refused), estimator)  # type: ignore[arg-type]
    return found


def exhausted(estimator: FakeEstimator, usable: int, ask: Ask = ASK) -> Frontier:
    """With nothing left."""
    found = frontier(estimator, usable, ask)
    while found.lowest < inf:
        found.advance()
    assert found.left == 0
    return found


@cache
def all_that_fit(usable: int) -> tuple[Timed, ...]:
    """Of `NO_RECOMPUTATION`, each by itself, in no order."""
    estimator = FakeEstimator(TINY, slack)
    legal = (lay for family in Space(NO_RECOMPUTATION).families(Counter()) for run in family.runs() for lay in run)
    fits = (q for q in map(estimator.estimate, legal) if not usable or q.allocated <= usable)
    return tuple(Timed(q, estimator.time(q)) for q in fits)  # type: ignore[arg-type]


def searched(estimator: FakeEstimator, over: Frontier) -> Search:
    return Search({BF16: estimator}, over)  # type: ignore[dict-item]


def everything() -> list[Layout]:
    return [lay for family in Space(ASK).families(Counter()) for run in family.runs() for lay in run]


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("usable", [0, 40 * GIB, 20 * GIB])
def test_the_best_are_the_best_of_all(k: int, usable: int) -> None:
    estimator, ask = FakeEstimator(TINY, slack), replace(ASK, pins={"zero": (0, 1)})
    search, every = searched(estimator, frontier(estimator, usable, ask)), exhausted(estimator, usable, ask).found
    found = search.best(k)
    timed = sorted((Timed(q, estimator.time(q)) for q in every.fits), key=lambda t: t.order)
    assert [t.layout for t in found] == [t.layout for t in timed[:k]]
    if usable != 20 * GIB:  # where few fit, few are spared
        assert search.simulated < len(every.fits) / 2
        assert search.frontier.found.count < every.count


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("usable", [0, 40 * GIB, 20 * GIB, 12 * GIB])
def test_a_higher_stage_is_among_the_best_where_it_is_faster_than_all_lower_ones(k: int, usable: int) -> None:
    """Of all that fit, those are left out that some lower stage makes needless."""
    estimator = FakeEstimator(TINY, slack)
    search = searched(estimator, frontier(estimator, usable, NO_RECOMPUTATION))
    found = search.best(k)
    timed = {t.layout: t for t in all_that_fit(usable)}

    def needless(lay: Layout) -> bool:
        mine = four_digits(timed[lay].time.seconds)
        return any(four_digits(timed[low].time.seconds) <= mine for low in lower_stages(lay) if low in timed)

    best = sorted((t for lay, t in timed.items() if not needless(lay)), key=lambda t: t.order)
    assert [t.layout for t in found] == [t.layout for t in best[:k]]
    if usable == 40 * GIB and k == 12:
        assert any(t.layout.zero > 1 for t in found) and any(map(needless, timed))
    counts = search.frontier.found
    assert counts.refused.total() + len(counts.fits) + search.frontier.left == Space(NO_RECOMPUTATION).enumerated


def test_what_is_left_is_priced_when_another_question_needs_it() -> None:
    """Searches one after the other find what each would have found alone."""
    estimator = FakeEstimator(TINY, slack)
    search, every = searched(estimator, frontier(estimator, 40 * GIB)), exhausted(estimator, 40 * GIB).found
    search.best(1)
    priced = search.frontier.found.count
    (found,) = search.best(1, among=lambda q: q.layout.tp == 4)
    assert priced < search.frontier.found.count < Space(ASK).enumerated
    timed = [Timed(q, estimator.time(q)) for q in every.fits if q.layout.tp == 4]
    assert found.layout == min(timed, key=lambda t: t.order).layout
    simplest = min(every.fits, key=lambda q: (effort(q.layout), q.allocated))
    assert search.simplest(BF16).layout == simplest.layout
    far = max(every.fits, key=lambda q: q.at_least).layout
    assert far not in {q.layout for q in search.estimates}
    assert getattr(search.find(far, BF16), "layout", None) == far
    assert search.find(replace(far, dp=3), BF16) is None


def test_what_recomputes_without_need_is_looked_at_when_asked() -> None:
    """Its price is made only then, and the answer is that of simulating everything."""
    estimator = FakeEstimator(TINY)
    over = exhausted(estimator, 40 * GIB)
    before = len(estimator.estimated)
    (found,) = searched(estimator, over).best(1, among=lambda q: q.allocated < 19 * GIB, slower_too=True)
    assert 0 < len(estimator.estimated) - before <= len(over.found.slower) + len(over.found.higher)
    lean = [q for q in map(estimator.estimate, everything()) if q.allocated < 19 * GIB]
    assert found.layout == min((Timed(q, estimator.time(q)) for q in lean), key=lambda t: t.order).layout
    assert found.layout.zero > 1 or found.layout.recompute == ("*",)
    (again,) = searched(estimator, frontier(estimator, 40 * GIB)).best(
        1, among=lambda q: q.allocated < 19 * GIB, slower_too=True
    )
    assert again.layout == found.layout


def test_what_was_timed_is_told_though_no_search_has_come_to_it() -> None:
    estimator = FakeEstimator(TINY, slack)
    search, every = searched(estimator, frontier(estimator, 0)), exhausted(estimator, 0).found
    assert search.so_far(3) == []
    timed = [search.timed(q) for q in every.fits[:5]]
    assert search.so_far(3) == sorted(timed, key=lambda t: t.order)[:3]
    assert search.best(3) != search.so_far(5)


def test_one_of_each_kind() -> None:
    """Without higher stages of ZeRO, which are among the best where they happen to be faster."""
    estimator, ask = FakeEstimator(TINY, slack), replace(ASK, pins={"zero": (0, 1)})
    found = searched(estimator, frontier(estimator, 0, ask)).best(
        4, kind=lambda q: q.layout.tp, among=lambda q: q.layout.pp == 1
    )  # fmt: skip
    timed = [Timed(q, estimator.time(q)) for q in exhausted(estimator, 0, ask).found.fits if q.layout.pp == 1]
    best = [min((t for t in timed if t.layout.tp == tp), key=lambda t: t.order) for tp in (1, 2, 4, 8)]
    assert [t.layout for t in found] == [t.layout for t in sorted(best, key=lambda t: t.order)]


def test_what_does_not_fit_is_counted_and_larger_micro_batches_are_not_priced() -> None:
    class Unbound(FakeEstimator):
        """Rows come in their own order: smaller micro-batches first."""

        def at_least(self, lay: Layout) -> float:
            return 0.0

        def roughly(self, lay: Layout, largest: int, quick: None) -> float:
            return 0.0

    estimator = Unbound(TINY)
    priced = exhausted(estimator, 40 * GIB).found
    refused, estimated = priced.refused, len(estimator.estimated)
    whole = everything()
    fit = {lay for lay in whole if estimator.estimate(lay).allocated <= 40 * GIB}
    own, slower = {q.layout for q in priced.fits}, {s.layout for s in priced.slower}
    higher = {lay for h in priced.higher for lay in h.options}
    assert own | slower | higher >= fit >= own | slower
    assert len(higher) == len(priced.higher) == refused[NEEDLESS] > 0
    assert all(any(low in own for low in lower_stages(lay)) for lay in higher)
    assert not own & higher and not slower & higher
    assert priced.count == estimated < len(priced.fits) + refused[TOO_LARGE]  # some are refused by a bound
    accepted = len(priced.fits) + len(priced.slower)
    assert refused.total() + accepted == Space(ASK).enumerated
    assert refused[SMALLER_TOO_LARGE] > 0
    least = min(estimator.estimate(lay).allocated for lay in whole if lay not in fit)
    assert min(estimator.estimate(miss.layout).allocated for miss in priced.nearest.values()) == least


def test_what_is_left_is_counted() -> None:
    over = frontier(FakeEstimator(TINY, slack), 40 * GIB)
    searched(FakeEstimator(TINY, slack), over).best(1)
    accepted = len(over.found.fits) + len(over.found.slower)
    assert 0 < over.left == Space(ASK).enumerated - over.found.refused.total() - accepted


def lower_stages(lay: Layout) -> list[Layout]:
    """The same layout with less cut, from ZeRO 1 on, and no more recomputed."""
    if lay.zero < 2:
        return []
    found = [replace(lay, zero=1, reduce_scatter_once=False, reshard_after_step=False)]
    if lay.zero == 3 and not (lay.reduce_scatter_once or lay.reshard_after_step):
        found += [replace(lay, zero=2), replace(lay, reduce_scatter_once=True), replace(lay, reshard_after_step=True)]
    plain = [replace(other, recompute=("tp_all_gather",)) for other in found] if lay.schedule != "zb_h1" else []
    return found + [low for low in plain if low not in found]


def test_among_equals_the_simpler_is_first() -> None:
    class Flat(FakeEstimator):
        def _parts(self, lay: Layout) -> dict[str, float]:
            return {"compute": 1.0 + 1e-9 * lay.dp, "tensor": 0.0, "pipeline": 0.0}

    estimator = Flat(TINY)
    search = searched(estimator, frontier(estimator, 0))
    first, second, *_ = found = search.best(5)
    assert [t.layout for t in found] == sorted([q.layout for q in search.estimates], key=effort)[:5]
    assert search.simulated < len(search.estimates) / 4  # as fast and less simple: not simulated
    assert first.layout == Layout(dp=8, micro_batch_size=1, gradient_accumulation_steps=2, loss="chunked")
    assert effort(first.layout) < effort(second.layout)

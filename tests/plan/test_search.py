"""Branch and bound against simulating everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from zlib import crc32

import pytest

from penteract.plan.ask import Ask
from penteract.plan.search import SMALLER_TOO_LARGE, TOO_LARGE, Search, Timed, effort, price_all
from penteract.plan.space import Space
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.presets import TINY
from plan.fake import GIB, FakeQuoter

ASK = Ask(model=TINY, cluster=Cluster(gpus=8, memory_gib=80), sequence_length=256, global_batch_size=16)


def slack(lay: Layout) -> float:
    """Anything from 0 to a quarter of a second, the same for the same layout."""
    return crc32(repr(lay).encode()) % 1000 / 4000


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_best_are_the_best_of_all(k: int) -> None:
    quoter = FakeQuoter(TINY, slack)
    priced = price_all(Space(ASK).families(Counter()), quoter.quote, 40 * GIB, Counter())
    search = Search(quoter, priced.fits)  # type: ignore[arg-type]
    found = search.best(k)
    everything = sorted((Timed(q, quoter.time(q)) for q in priced.fits), key=lambda t: t.order)
    assert [t.layout for t in found] == [t.layout for t in everything[:k]]
    assert search.simulated < len(priced.fits) / 2


def test_what_recomputes_without_need_is_looked_at_when_asked() -> None:
    """Its price is made only then, and the answer is that of simulating everything."""
    quoter = FakeQuoter(TINY)
    families = list(Space(ASK).families(Counter()))
    priced = price_all(families, quoter.quote, 40 * GIB, Counter())
    before = len(quoter.quoted)
    search = Search(quoter, priced.fits, priced.slower)  # type: ignore[arg-type]
    (found,) = search.best(1, among=lambda q: q.allocated < 19 * GIB, slower_too=True)
    assert 0 < len(quoter.quoted) - before <= len(priced.slower)
    lean = [q for q in (quoter.quote(lay) for f in families for lay in f) if q.allocated < 19 * GIB]
    assert found.layout == min((Timed(q, quoter.time(q)) for q in lean), key=lambda t: t.order).layout
    assert found.layout.remake == ("*",)


def test_one_of_each_kind() -> None:
    quoter = FakeQuoter(TINY, slack)
    priced = price_all(Space(ASK).families(Counter()), quoter.quote, 0, Counter())
    found = Search(quoter, priced.fits).best(4, kind=lambda lay: lay.tp, among=lambda q: q.layout.pp == 1)  # type: ignore[arg-type]
    everything = [Timed(q, quoter.time(q)) for q in priced.fits if q.layout.pp == 1]
    best = [min((t for t in everything if t.layout.tp == tp), key=lambda t: t.order) for tp in (1, 2, 4, 8)]
    assert [t.layout for t in found] == [t.layout for t in sorted(best, key=lambda t: t.order)]


def test_what_does_not_fit_is_counted_and_larger_micro_batches_are_not_priced() -> None:
    quoter, refused = FakeQuoter(TINY), Counter[str]()
    families = list(Space(ASK).families(Counter()))
    priced = price_all(families, quoter.quote, 40 * GIB, refused)
    whole = [lay for family in families for lay in family]
    fit = [lay for lay in whole if quoter.quote(lay).allocated <= 40 * GIB]
    slower = {lay for _, lay in priced.slower}
    assert {q.layout for q in priced.fits} | slower == set(fit)
    assert all(quoter.quote(replace(lay, remake=("enter",))).allocated <= 40 * GIB for lay in slower)
    assert priced.count == len(priced.fits) + refused[TOO_LARGE]
    assert refused.total() + len(fit) == len(whole)
    assert refused[SMALLER_TOO_LARGE] > 0
    least = min(quoter.quote(lay).allocated for lay in whole if lay not in fit)
    assert priced.misses[0].allocated == least


def test_among_equals_the_simpler_is_first() -> None:
    class Flat(FakeQuoter):
        def _parts(self, lay: Layout) -> dict[str, float]:
            return {"compute": 1.0 + 1e-9 * lay.dp, "tensor": 0.0, "pipeline": 0.0}

    quoter = Flat(TINY)
    priced = price_all(Space(ASK).families(Counter()), quoter.quote, 0, Counter())
    first, second, *_ = Search(quoter, priced.fits).best(5)  # type: ignore[arg-type]
    assert first.layout == Layout(dp=8, micro_batch_size=1, gradient_accumulation_steps=2)
    assert effort(first.layout) < effort(second.layout)

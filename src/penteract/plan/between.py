"""Recomputation between none and full, for layouts that need some: the cheapest of a few that fits, exactly.

A layout that fits with full recomputation alone is a candidate. What it takes without any bounds from below what it
takes with some, so candidates are looked at from the lowest such bound up, and those whose bound lies above the k-th
best are left. Of a candidate's recomputations the first that fits is kept: each costs more than the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penteract.plan.ask import EDITS, RECOMPUTE, Ask
from penteract.plan.search import PLAIN, TOO_LARGE, Priced, Search, four_digits, within
from penteract.spec.model import ModelSpec

_FULL = RECOMPUTE["full"]


@dataclass(frozen=True, slots=True)
class Between:
    """`candidates`: layouts that fit with full recomputation alone; `looked_at`: those of them that could be among the
    best; `tried`: layouts with less of it, and how many of them `fit`."""

    candidates: int = 0
    looked_at: int = 0
    tried: int = 0
    fit: int = 0


def recomputations(model: ModelSpec) -> tuple[Mapping[str, Any], ...]:
    """Fields of a layout, from the cheapest up: the activation, norms too, and all of every other layer."""
    norm = "rms_norm" if model.norm == "rms" else "layer_norm"
    return (
        {"remake": (*PLAIN, model.activation)},
        {"remake": (*PLAIN, norm, model.activation)},
        {"remake": _FULL, "remake_every": 2, "remake_else": PLAIN},
    )


def try_between(ask: Ask, found: Priced, search: Search, refused: Counter[str], k: int) -> Between:
    """Add to `search` what may be among its `k` best; what does not fit is counted in `refused`. Nothing where what is
    remade or offloaded is pinned, or memory is not known."""
    if not ask.usable or EDITS.keys() & ask.pins.keys():
        return Between()
    candidates = sorted(_candidates(found, search), key=lambda c: c[0])
    looked_at = tried = fit = 0
    best = search.best(k)
    for bound, quote in candidates:
        if len(best) == k and four_digits(bound) > four_digits(best[-1].time.seconds):
            break
        looked_at += 1
        for fields in recomputations(ask.model):
            layout, prices = replace(quote.layout, **fields), search.quoters[quote.precision]
            tried += 1
            if priced := within(prices, layout, ask.usable, found, quote.precision):
                fit += 1
                search.add(priced)
                best = search.best(k)
                break
            refused[TOO_LARGE] += 1
    return Between(len(candidates), looked_at, tried, fit)


def _candidates(found: Priced, search: Search) -> Iterator[tuple[float, Any]]:
    """With the bound of what each takes without recomputation."""
    fits = {(q.layout, q.precision) for q in found.fits}
    for q in found.fits:
        if q.layout.remake == _FULL and (replace(q.layout, remake=PLAIN), q.precision) not in fits:
            yield search.quoters[q.precision].bound_of_plain(q), q

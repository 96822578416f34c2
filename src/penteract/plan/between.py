"""Recomputation between none and full, for layouts that need some: the cheapest of a few that fits, exactly.

A layout that fits with full recomputation, and not with none, is a candidate. What it takes without any bounds from
below what it takes with some, so candidates are looked at from the lowest such bound up, and those whose bound lies
above the k-th best are left. Of a candidate's recomputations the first that fits is kept: each costs more than the one
before, so the others are needless; as are those of a higher stage of ZeRO, from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penteract.plan.ask import EDITS, RECOMPUTE, Ask
from penteract.plan.rows import TOO_LARGE, Priced, Sharing, lower_stages
from penteract.plan.search import Search, four_digits
from penteract.spec.layout import Layout
from penteract.spec.model import ModelSpec
from penteract.spec.precision import Policy
from penteract.spec.recompute import NONE
from penteract.units import Seconds

_FULL = RECOMPUTE["full"]


@dataclass(frozen=True, slots=True)
class Between:
    """`candidates`: layouts that fit with full recomputation; `looked_at`: those of them that do not fit with none and
    could be among the best; `tried`: layouts with less of it, and how many of them `fit`."""

    candidates: int = 0
    looked_at: int = 0
    tried: int = 0
    fit: int = 0


def recomputations(model: ModelSpec) -> tuple[Mapping[str, Any], ...]:
    """Fields of a layout, from the cheapest up: the activation, norms too, and all of every other layer."""
    norm = "rms_norm" if model.norm == "rms" else "layer_norm"
    return (
        {"remake": (*NONE, model.activation)},
        {"remake": (*NONE, norm, model.activation)},
        {"remake": _FULL, "remake_every": 2, "remake_else": NONE},
    )


def try_between(ask: Ask, search: Search, k: int) -> Between:
    """Add to `search` what may be among its `k` best, and count there what does not fit. Nothing where what is remade
    or offloaded is pinned, or memory is not known."""
    if not ask.usable or EDITS.keys() & ask.pins.keys():
        return Between()
    best, found = search.best(k), search.frontier.found  # what is not priced after this is none of the best
    fits = {(q.layout, q.precision) for q in found.fits}
    candidates = sorted(_candidates(found, search), key=lambda c: (c[0], c[1].zero))
    some, looked_at, tried, fit = recomputations(ask.model), 0, 0, 0
    reached = dict[tuple[Layout, Policy], dict[Sharing, int]]()

    def beyond(bound: Seconds) -> bool:
        return len(best) == k and four_digits(bound) > four_digits(best[-1].time.seconds)

    for bound, layout, precision in candidates:
        if beyond(bound):
            break
        own, rest = _shared(layout)
        if any((_cut(rest, sharing, NONE), precision) in fits for sharing in (own, *lower_stages(*own))):
            continue
        looked_at += 1
        known = reached.setdefault((rest, precision), {})
        enough = min([known[s] for s in lower_stages(*own) if s in known], default=len(some))
        for i, fields in enumerate(some[:enough]):
            tried += 1
            quote = found.within(search.quoters[precision], replace(layout, **fields))
            if quote:
                fit += 1
                known[own] = i
                search.add(quote)
                if not beyond(quote.at_least):
                    best = search.best(k)
                break
            found.refused[TOO_LARGE] += 1
    return Between(len(candidates), looked_at, tried, fit)


def _shared(layout: Layout) -> tuple[Sharing, Layout]:
    """How state is cut, and what all that differ in this alone share."""
    own = (layout.zero, layout.whole_gradients, layout.keep_gathered)
    return own, replace(layout, zero=0, whole_gradients=False, keep_gathered=False)


def _cut(layout: Layout, sharing: Sharing, remake: tuple[str, ...]) -> Layout:
    zero, whole, gathered = sharing
    return replace(layout, zero=zero, whole_gradients=whole, keep_gathered=gathered, remake=remake)


def _candidates(found: Priced, search: Search) -> Iterator[tuple[Seconds, Layout, Policy]]:
    """With the bound of what each takes without recomputation: its own, or that of a lower stage which fits too."""
    for q in found.fits:
        if q.layout.remake == _FULL:
            yield search.quoters[q.precision].bound_of_plain(q), q.layout, q.precision
    for s in found.slower:
        if s.memory.remake == s.twin.layout.remake == _FULL:
            yield search.quoters[s.precision].bound_of_plain(s.twin), s.layout, s.precision

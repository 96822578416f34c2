"""Recomputation between none and full, for layouts that need some: the cheapest of a few that fits, exactly.

A layout that may fit with full recomputation, and does not with none, is a candidate. What it takes without any bounds
from below what it takes with some, so candidates are looked at from the lowest such bound up, and those whose bound
lies above the k-th best are left. Of a candidate's recomputations the first that fits is kept: each costs more than
the one before, so the others are needless. Those that cost no less than what a lower stage of ZeRO needs wait with
their bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy
from penteract.config.recompute import NONE
from penteract.planner.ask import EDITS, RECOMPUTE, Ask
from penteract.planner.search.best import Search, four_digits
from penteract.planner.search.rows import TOO_LARGE, Higher, Priced, Sharing, lower_stages
from penteract.readings.estimator import LayoutEstimate
from penteract.units import Seconds

_FULL = RECOMPUTE["full"]


@dataclass(slots=True)
class Between:
    """`candidates`: layouts that fit with full recomputation, or may; `looked_at`: those of them that do not fit with
    none and could be among the best; `tried`: layouts with less of it, and how many of them `fit`."""

    candidates: int = 0
    looked_at: int = 0
    tried: int = 0
    fit: int = 0


def recomputations(model: ModelSpec) -> tuple[Mapping[str, Any], ...]:
    """Fields of a layout, from the cheapest up: the activation, norms too, and all of every other layer."""
    norm = "rms_norm" if model.norm == "rms" else "layer_norm"
    return (
        {"recompute": (*NONE, model.activation)},
        {"recompute": (*NONE, norm, model.activation)},
        {"recompute": _FULL, "recompute_every": 2, "recompute_else": NONE},
    )


def try_between(ask: Ask, search: Search, k: int, told: Between) -> None:
    """Add to `search` what may be among its `k` best, and count there what does not fit; the rest is counted in `told`.
    Nothing where what is recomputed or offloaded is pinned, or memory is not known."""
    if not ask.usable or {*EDITS} & ask.pins.keys():
        return
    best, found = search.best(k), search.frontier.found  # what is not priced after this is none of the best
    fits = {(_rest(q.layout), q.layout.recompute, _sharing(q.layout), q.precision) for q in found.fits}
    candidates = sorted(_candidates(found, search), key=lambda c: (c[0], c[1].zero))
    some, told.candidates = recomputations(ask.model), len(candidates)
    reached = dict[tuple[tuple[Any, ...], Policy], dict[Sharing, tuple[int, LayoutEstimate | Higher]]]()

    def beyond(bound: Seconds) -> bool:
        return len(best) == k and four_digits(bound) > four_digits(best[-1].time.seconds)

    for bound, layout, precision in candidates:
        search.pulse()
        if beyond(bound):
            break
        own, rest = _sharing(layout), _rest(layout)
        lower = lower_stages(*own)
        if any((rest, NONE, sharing, precision) in fits for sharing in (own, *lower)) and not _only_lower(
            search, layout, precision, own_fits=(rest, NONE, own, precision) in fits
        ):
            continue
        told.looked_at += 1
        known = reached.setdefault((rest, precision), {})
        axes: dict[str, Any] = dict(zip(_NAMES, _values(layout), strict=True))
        simpler = [known[s] for s in lower if s in known]
        enough = min([i for i, _ in simpler], default=len(some))
        options = [Layout(**{**axes, **less}) for less in some]
        for i, less in enumerate(options[:enough]):
            told.tried += 1
            estimate = found.within(search.estimators[precision], less)
            if estimate:
                told.fit += 1
                known[own] = i, estimate
                search.add(estimate)
                if not beyond(estimate.at_least):
                    best = search.best(k)
                break
            found.refused[TOO_LARGE] += 1
        else:
            if options[enough:]:
                others = tuple([one for _, one in simpler])
                higher = Higher(tuple(options[enough:]), search.estimators[precision], others, told)
                found.higher.append(higher)
                known[own] = enough, higher


# How state is cut, and all but that and the ops that are recomputed: what layouts have in common that are compared.
_NAMES = tuple(f.name for f in fields(Layout))
_SHARING = ("zero", "reduce_scatter_once", "reshard_after_step")
_sharing = attrgetter(*_SHARING)
_rest = attrgetter(*(name for name in _NAMES if name not in (*_SHARING, "recompute")))
_values = attrgetter(*_NAMES)


def _candidates(found: Priced, search: Search) -> Iterator[tuple[Seconds, Layout, Policy]]:
    """With the bound of what each takes without recomputation."""
    full = ((q.layout, q.precision) for q in found.fits)
    higher = ((h.options[0], h.precision) for h in found.higher)
    rows = ((lay, row.branch.prices.policy) for row in search.frontier.waiting for lay in row.may_fit(found.usable))
    for layout, precision in chain(full, higher, rows):
        if layout.recompute != _FULL:
            continue
        yield search.estimators[precision].bounds.of(replace(layout, recompute=NONE)), layout, precision


def _only_lower(search: Search, layout: Layout, precision: Policy, *, own_fits: bool) -> bool:
    """Whether without recomputation it fits with less cut alone."""
    usable = search.frontier.found.usable
    return not own_fits and search.estimators[precision].estimate(replace(layout, recompute=NONE)).allocated > usable

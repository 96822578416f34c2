"""Recomputation between none and full, for layouts that need some: of a few kinds, the cheapest that fits.

A candidate is a layout that may fit with full recomputation, but does not fit with none. Its time without recomputation
is a lower bound of its time with some. So candidates are tried in the order of this bound, until it is above the k-th
best. Of a candidate's recomputations, the first that fits is kept: each costs more than the one before. Those that cost
no less than what a lower ZeRO stage needs wait with their bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
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
    """How many layouts were considered.

    candidates  layouts that fit with full recomputation, or may fit
    looked_at   candidates that do not fit without recomputation and could be among the best
    tried       layouts with some recomputation; `fit`: how many of them fit
    """

    candidates: int = 0
    looked_at: int = 0
    tried: int = 0
    fit: int = 0


def recomputations(model: ModelSpec) -> tuple[Mapping[str, Any], ...]:
    """Fields of a layout, the cheapest first: the activation function; norms, too; every second layer as a whole."""
    norm = "rms_norm" if model.norm == "rms" else "layer_norm"
    return (
        {"recompute": (*NONE, model.activation)},
        {"recompute": (*NONE, norm, model.activation)},
        {"recompute": _FULL, "recompute_every": 2, "recompute_else": NONE},
    )


def try_between(ask: Ask, search: Search, k: int, counts: Between) -> None:
    """Add layouts with some recomputation to `search` if they may be among its `k` best; those that do not fit are
    counted there as refused. `counts` is updated. Does nothing if recomputation or offload is pinned, or if memory is
    not known."""
    if not ask.usable or {*EDITS} & ask.pins.keys():
        return
    best, found = search.best(k), search.frontier.found  # layouts not estimated by now are not among the best
    fits = {(_rest(q.layout), q.layout.recompute, _sharing(q.layout), q.precision) for q in found.fits}
    candidates = sorted(_candidates(found, search), key=lambda c: (c[0], c[1].zero))
    some, counts.candidates = recomputations(ask.model), len(candidates)
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
        counts.looked_at += 1
        by_sharing = reached.setdefault((rest, precision), {})
        simpler = [by_sharing[s] for s in lower if s in by_sharing]
        enough = min([i for i, _ in simpler], default=len(some))
        options = [layout.put(**less) for less in some]
        for i, less in enumerate(options[:enough]):
            counts.tried += 1
            estimate = found.within(search.estimators[precision], less)
            if estimate:
                counts.fit += 1
                by_sharing[own] = i, estimate
                search.add(estimate)
                if not beyond(estimate.at_least):
                    best = search.best(k)
                break
            found.refused[TOO_LARGE] += 1
        else:
            if options[enough:]:
                others = tuple([one for _, one in simpler])
                higher = Higher(tuple(options[enough:]), search.estimators[precision], others, counts)
                found.higher.append(higher)
                by_sharing[own] = enough, higher


# Getters of how state is sharded, and of all fields but these and `recompute`: compared layouts agree in the latter.
_SHARING = ("zero", "reduce_scatter_once", "reshard_after_step")
_sharing = attrgetter(*_SHARING)
_rest = attrgetter(*(f.name for f in fields(Layout) if f.name not in (*_SHARING, "recompute")))


def _candidates(found: Priced, search: Search) -> Iterator[tuple[Seconds, Layout, Policy]]:
    """The candidates: (lower bound of the time without recomputation, layout, precision)."""
    full = ((q.layout, q.precision) for q in found.fits)
    higher = ((h.options[0], h.precision) for h in found.higher)
    rows = ((lay, row.branch.prices.policy) for row in search.frontier.waiting for lay in row.may_fit(found.usable))
    for layout, precision in chain(full, higher, rows):
        if layout.recompute != _FULL:
            continue
        yield search.estimators[precision].bounds.of(layout.put(recompute=NONE)), layout, precision


def _only_lower(search: Search, layout: Layout, precision: Policy, *, own_fits: bool) -> bool:
    """Whether, without recomputation, only layouts with less sharding fit."""
    usable = search.frontier.found.usable
    return not own_fits and search.estimators[precision].estimate(layout.put(recompute=NONE)).allocated > usable

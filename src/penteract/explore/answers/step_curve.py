"""Memory of a rank over a simulated step: what its calls hold, at the times at which the clock has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penteract.config.layout import Layout
from penteract.explore.amounts import amount, bytes_axis, card_of, seconds_axis
from penteract.explore.answers.memory_figures import held, rank_label
from penteract.explore.schemas.page_schema import VERSION, StepAnswer, StepPoint
from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed
from penteract.readings.time.timelines.timeline import Event, emit_events
from penteract.readings.time.timelines.trace import MemoryCounter, program
from penteract.schedule.registry import schedule_of
from penteract.units import GIB, Bytes, Seconds, show_step

_PICO = 1e-12
_TIME_BINS = 360  # of the step; in each, the moments with the most and the least bytes are drawn


@dataclass(slots=True)
class _Moments:
    """The bytes in use while calls run, and after them, of one pipeline rank.

    found  (picoseconds, bytes of activations, bytes of workspace, the call), in the order of the clock
    """

    pp_rank: int
    counter: MemoryCounter
    found: list[tuple[int, Bytes, Bytes, str]] = field(default_factory=list[tuple[int, Bytes, Bytes, str]])

    def event(self, e: Event) -> None:
        if e.pp_rank != self.pp_rank or e.stream != "compute" or (around := self.counter.around(e)) is None:
            return
        during, after = around
        what = " · ".join(text for text in (e.name, e.unit, e.action) if text)
        self.found.append((e.start, during["activations"], during["workspace"], what))
        self.found.append((e.end, after["activations"], after["workspace"], what))


def step_curve(plan: Plan, timed: Timed, at: int) -> StepAnswer:
    """Memory of the rank at pipeline coordinate `at` over the step. Of many micro-batches, as many are
    simulated as fill the pipeline and a few more: the others repeat what is shown."""
    prices, lay = plan.search.estimators[timed.estimate.precision], timed.layout
    short = shortened(lay)
    moments = _Moments(at, MemoryCounter.of(program(prices.steps, short, at), prices.composer.load(short)))
    span = emit_events(prices.steps, short, moments.event)
    price = prices.composer.rank(lay, at)
    total, stays = price.allocated, held(price)
    fixed = sum(one["amount"]["bytes"] for one in stays)
    points = drawn(moments.found, span.picoseconds, fixed)
    axis, near = bytes_axis(total, int(plan.ask.cluster.memory_gib * GIB))
    seconds = span.picoseconds * _PICO
    return {
        "version": VERSION, "kind": "step", "pp_rank": at, "rank_label": rank_label(timed, at),
        "held": stays, "points": points,
        "peak": max(range(len(points)), key=lambda i: points[i]["total"]["bytes"], default=0),
        "allocated": amount(total), "card": card_of(plan.ask, drawn=near), "across": seconds_axis(seconds),
        "axis": axis, "seconds": show_step(seconds), "note": shown_note(lay, short, timed.time.seconds),
    }  # fmt: skip


def shortened(layout: Layout) -> Layout:
    """The layout with as few micro-batches as show all that the rank holds: a full pipeline, and one turn more."""
    schedule = schedule_of(layout.schedule)
    enough = schedule.steady_after(layout.pp, layout.vpp) + 2 * schedule.period(layout.pp, layout.vpp)
    multiple = schedule.round(layout.pp)
    enough = -(-max(enough, 3) // multiple) * multiple
    all_forwards_first = not schedule.alternates  # then each micro-batch more is held too
    if all_forwards_first or enough >= layout.gradient_accumulation_steps:
        return layout
    return replace(layout, gradient_accumulation_steps=enough)


def drawn(found: Sequence[tuple[int, Bytes, Bytes, str]], span: int, fixed: Bytes) -> list[StepPoint]:
    """At most two moments of each bin of the step's time: that with the most bytes and that with the least, in their
    order. `span`: of the step, in picoseconds; `fixed`: bytes that are always allocated."""
    bins: dict[int, list[int]] = {}
    for i, (when, *_) in enumerate(found):
        bins.setdefault(min(_TIME_BINS - 1, _TIME_BINS * when // max(1, span)), []).append(i)
    chosen = set[int]()
    for some in bins.values():
        chosen |= {max(some, key=lambda i: sum(found[i][1:3])), min(some, key=lambda i: sum(found[i][1:3]))}
    return [_point(*found[i], span, fixed) for i in sorted(chosen)]


def _point(when: int, activations: Bytes, workspace: Bytes, what: str, span: int, fixed: Bytes) -> StepPoint:
    return {
        "at": when / max(1, span), "activations": activations, "workspace": workspace,
        "total": amount(fixed + activations + workspace), "what": what,
    }  # fmt: skip


def shown_note(layout: Layout, short: Layout, seconds: Seconds) -> str:
    """Which micro-batches are shown, if not all: `short` is the layout that was simulated."""
    shown, all_of_them = short.gradient_accumulation_steps, layout.gradient_accumulation_steps
    if shown == all_of_them:
        return ""
    rest = f"The whole step takes {show_step(seconds)}."
    return f"{shown} of {all_of_them} micro-batches are shown: the others repeat them. {rest}"

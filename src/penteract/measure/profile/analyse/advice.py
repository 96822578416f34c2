"""What would shorten a measured step most: other values of the run file, as the planner predicts them, and parts of the
step that take longer than predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penteract.errors import BadInput
from penteract.measure.profile.prediction import Prediction, ask_of_run
from penteract.measure.schemas.profile import Advice, OpRow, WaterfallRow
from penteract.planner.ask import as_settings
from penteract.planner.plan import estimator, plan_one
from penteract.units import show_bytes, show_step

_LEAST_SHARE = 0.01  # of a step: smaller gains are left out
_PS = 10**12  # picoseconds in a second
_MOST = 5  # changes that are shown
_OF_MEASURING = ("profiler",)  # rows of the waterfall that no change of the run shortens


def advice(predicted: Prediction, waterfall: Sequence[WaterfallRow], rows: Sequence[OpRow]) -> list[Advice]:
    """At most five changes, the largest gain first.

    predicted  the planner's step of this run
    waterfall  rows from the ideal step to the predicted to the measured one
    rows       the ops, with predicted and measured picoseconds
    """
    found = [*_faster_layouts(predicted), *slower_parts(waterfall, rows, _LEAST_SHARE)]
    return sorted(found, key=lambda one: -one["gain"])[:_MOST]


def _faster_layouts(predicted: Prediction) -> Iterator[Advice]:
    """Neighbours of the layout that fit and are predicted to be faster, each with the memory that it takes."""
    ask, own = ask_of_run(predicted.run, predicted.prices.cluster), as_settings(predicted.run.layout)
    was = predicted.timed.estimate.allocated
    for what, changes in _neighbours(own):
        settings = {setting: (value,) for setting, value in {**own, **changes}.items()}
        try:
            plan = plan_one(ask, settings, estimator)
        except BadInput:
            continue
        gain = predicted.step - round(plan.best.time.seconds * _PS)
        more = plan.best.estimate.allocated - was
        if gain > _LEAST_SHARE * predicted.step and plan.fits(plan.best.estimate):
            price = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'} a rank" if more else "no memory"
            yield {"kind": "layout", "what": what, "gain": gain, "price": price}


def _neighbours(own: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts that differ in one decision and train on the same samples in a step: what the change is, in words, and
    the settings that it changes. `own`: the settings of the run's layout."""
    if own.get("recompute") not in (None, "none", "nothing", ()):
        yield "recompute nothing", {"recompute": "none"}
    micro = int(own.get("micro_batch_size", 1))
    yield f"micro-batches of {2 * micro}", {"micro_batch_size": 2 * micro}
    if micro > 1 and micro % 2 == 0:
        yield f"micro-batches of {micro // 2}", {"micro_batch_size": micro // 2}
    for zero in range(int(own.get("zero", 0))):
        yield f"ZeRO {zero}", {"zero": zero}
    for axis in ("tp", "pp", "cp"):
        degree, dp = int(own.get(axis, 1)), int(own.get("dp", 1))
        if degree % 2 == 0:
            yield f"{axis} {degree // 2}, dp {2 * dp}", {axis: degree // 2, "dp": 2 * dp}
    if int(own.get("pp", 1)) > 1:
        yield from ((f"schedule {name}", {"schedule": name}) for name in ("1f1b", "zb_h1") if name != own["schedule"])


def slower_parts(waterfall: Sequence[WaterfallRow], rows: Sequence[OpRow], least_share: float) -> Iterator[Advice]:
    """Parts of the step that take longer than predicted, each with the two ops that add most to it. Parts whose excess
    is less than `least_share` of the step are left out."""
    at = next(i for i, row in enumerate(waterfall) if row["name"] == "predicted")
    for row in waterfall[at + 1 :]:
        if row["level"] or row["name"] in _OF_MEASURING or row["picoseconds"] <= 0 or row["share"] < least_share:
            continue
        own = [r for r in rows if r["part"] == row["name"] and r["measured"] > r["predicted"]]
        most = sorted(own, key=lambda r: r["predicted"] - r["measured"])[:2]
        ops = ", ".join(f"{r['name']} {show_step((r['measured'] - r['predicted']) / _PS, '+')}" for r in most)
        about = row["about"].partition(". ")[0].rstrip(".")
        yield {"kind": "part", "what": f"{row['label'].lower()} in the predicted time", "gain": row["picoseconds"],
               "price": f"most in: {ops}" if ops else about[:1].lower() + about[1:]}  # fmt: skip

"""What gains most: other values of the run file, each priced by the planner, and time that no prediction explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penteract.errors import BadInput
from penteract.measure.profile.prediction import Prediction, ask_of_run
from penteract.measure.schemas.profile import Advice, OpRow, WaterfallRow
from penteract.planner.ask import as_settings
from penteract.planner.plan import estimator, plan_one
from penteract.units import show_bytes, show_step

_LEAST = 0.01  # of a step
_PS = 10**12
_MOST = 5
_OF_MEASURING = ("profiler",)  # a row that no change of the run shortens


def advice(predicted: Prediction, waterfall: Sequence[WaterfallRow], rows: Sequence[OpRow]) -> list[Advice]:
    """The largest wins first."""
    least = _LEAST * predicted.step
    found = [*_layouts(predicted, least), *beyond(waterfall, rows, _LEAST)]
    return sorted(found, key=lambda one: -one["gain"])[:_MOST]


def _layouts(predicted: Prediction, least: float) -> Iterator[Advice]:
    """Neighbours of the layout that are predicted to be faster, each with what it takes in memory."""
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
        if gain > least and plan.fits(plan.best.estimate):
            price = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'} a rank" if more else "no memory"
            yield {"kind": "layout", "what": what, "gain": gain, "price": price}


def _neighbours(own: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one decision that leave the step's samples as they are."""
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


def beyond(waterfall: Sequence[WaterfallRow], rows: Sequence[OpRow], least: float) -> Iterator[Advice]:
    """Parts that take longer than predicted, with the ops that make most of it."""
    at = next(i for i, row in enumerate(waterfall) if row["name"] == "predicted")
    for row in waterfall[at + 1 :]:
        if row["level"] or row["name"] in _OF_MEASURING or row["picoseconds"] <= 0 or row["share"] < least:
            continue
        own = [r for r in rows if r["part"] == row["name"] and r["measured"] > r["predicted"]]
        most = sorted(own, key=lambda r: r["predicted"] - r["measured"])[:2]
        ops = ", ".join(f"{r['name']} {show_step((r['measured'] - r['predicted']) / _PS, '+')}" for r in most)
        yield {"kind": "part", "what": f"{row['label'].lower()} as predicted", "gain": row["picoseconds"],
               "price": f"most in: {ops}" if ops else row["about"].rstrip(".")}  # fmt: skip

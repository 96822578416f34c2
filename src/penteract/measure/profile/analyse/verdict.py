"""The verdict of a profile: from the ideal step to the predicted one to the measured one, in rows that add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from penteract.measure.profile.analyse.attribution import GAPS, OWN
from penteract.measure.profile.analyse.op_rows import MeasuredRank, slowest_of_pp_rank
from penteract.measure.profile.prediction import Prediction
from penteract.measure.schemas.profile import StepTimes, WaterfallRow
from penteract.planner.report.waterfall import STEPS
from penteract.readings.ideal import PARTS

# What each change from predicted to measured is called, and what it is.
_LABELS: Mapping[str, tuple[str, str]] = {
    "compute": ("Matmuls", "Kernels of matrix products beyond their prediction."),
    "attention": ("Attention", "Kernels of attention beyond their prediction."),
    "pointwise": ("Memory-bound ops", "Norms, activations and additions beyond their prediction."),
    "launch": ("Host gaps", "Time in which nothing ran, beyond what was predicted for launches. The profiler slows the "
               "host, so its own cost is taken off here first."),
    "tensor": ("Exposed: tensor", "Waits for tensor parallelism beyond their prediction."),
    "context": ("Exposed: context", "Waits for context parallelism beyond their prediction."),
    "expert": ("Exposed: expert", "Waits for expert parallelism beyond their prediction."),
    "data": ("Exposed: data", "Waits for data parallelism beyond their prediction."),
    "pipeline": ("Bubble", "Waits for other pipeline ranks beyond their prediction."),
    "update": ("Optimizer", "The update, and the agreement of ranks before it, beyond their prediction."),
    "host": ("Host copies", "Copies to and from the host that nothing hides, beyond their prediction."),
    "unmatched": ("Unmatched", "Kernels that no part of the program launched, or of parts without a prediction."),
    "slowest_rank": ("Slowest rank", "What the slowest GPU of a pipeline rank works more than the median one."),
    "profiler": ("Profiled steps", "What bare steps took otherwise than those under the profiler, beyond host gaps."),
}  # fmt: skip


class StepVerdict(NamedTuple):
    """The waterfall, and the rank that it is about."""

    rows: list[WaterfallRow]
    rank: int


def verdict(predicted: Prediction, ranks: Sequence[MeasuredRank], times: StepTimes) -> StepVerdict:
    """The waterfall of the pipeline rank that is predicted to end last, on the slowest of its ranks."""
    chosen = slowest_of_pp_rank(ranks, predicted.slowest)
    peers = [r for r in ranks if r.recording.pp_rank == predicted.slowest]
    changes = _beyond(predicted, chosen, peers, times["measured"])
    rows, whole = list[WaterfallRow](), times["measured"]

    def add(name: str, label: str, about: str, picoseconds: int, *, level: bool = False) -> None:
        share = picoseconds / whole if whole else 0.0
        rows.append({"name": name, "label": label, "about": about, "level": level, "picoseconds": picoseconds,
                     "share": share})  # fmt: skip

    add("ideal", *STEPS["ideal"], predicted.ideal, level=True)
    for name, label, about, size in predicted.rows:
        if name != "ideal":
            add(name, label, about, size)
    add("predicted", "Predicted", "The step as it is planned.", predicted.step, level=True)
    for name, size in changes:
        add(name, *_LABELS[name], size)
    add("measured", "Measured", "The median of the steady steps without a profiler.", whole, level=True)
    return StepVerdict(rows, chosen.recording.rank)


def _beyond(
    predicted: Prediction, chosen: MeasuredRank, peers: Sequence[MeasuredRank], measured: int
) -> Iterator[tuple[str, int]]:
    """What each part takes beyond its prediction; these sum to the measured step without the predicted one."""
    parts = {part: chosen.parts.get(part, 0) for part in (*PARTS, "unmatched")}
    typical = {part: median_low(r.parts.get(part, 0) for r in peers) if part in OWN else parts[part] for part in parts}
    slower = sum(parts[part] - typical[part] for part in parts)
    cost = sum(parts.values()) - measured  # of the profiler
    hidden = min(max(cost, 0), max(typical[GAPS], 0))
    typical[GAPS] -= hidden
    for part, size in typical.items():
        if change := size - predicted.totals.get(part, 0):
            yield part, change
    if slower:
        yield "slowest_rank", slower
    if rest := hidden - cost:
        yield "profiler", rest

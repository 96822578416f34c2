"""The parts of a step under one name, predicted and measured: the rows of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penteract.measure.profile.analyse.attribution import own_work
from penteract.measure.profile.prediction import PredictedOp, Prediction, part_of
from penteract.measure.profile.recording import Recording
from penteract.measure.profile.trace_events import Span
from penteract.measure.schemas.profile import Ceilings, KernelRow, OpRow, Unmatched
from penteract.step import names

OUTSIDE = "between the parts"  # what no part of the program launched: batches, the loss, the learning rate
_MOST_KERNELS = 8
_PS = 10**12


class MeasuredRank(NamedTuple):
    """A rank's recording with the parts of its mean profiled step."""

    recording: Recording
    parts: Mapping[str, int]

    @property
    def work(self) -> int:
        """Picoseconds of its own kernels."""
        return own_work(self.parts)


@dataclass(slots=True)
class _Measured:
    """What ran under a name: nanoseconds by kind and by kernel, in all profiled steps."""

    first: int
    by_kind: Counter[str] = field(default_factory=Counter[str])
    kernels: Counter[str] = field(default_factory=Counter[str])
    calls_of: Counter[str] = field(default_factory=Counter[str])
    calls: int = 0

    def add(self, span: Span) -> None:
        if span.kind == "call":
            self.calls += 1
            return
        self.by_kind[span.kind] += span.nanoseconds
        self.kernels[span.kernel] += span.nanoseconds
        self.calls_of[span.kernel] += 1

    @property
    def nanoseconds(self) -> int:
        """Of a collective its own time, whatever starts it or waits for it; else that of all kernels."""
        return self.by_kind["collective"] or self.by_kind.total()


def measured_by_name(recording: Recording) -> dict[str, _Measured]:
    """What ran under each name, in the order of the step."""
    found = dict[str, _Measured]()
    for step in recording.steps:
        for span in step.spans:
            if (name := span.name or OUTSIDE) not in found:
                found[name] = _Measured(span.begin)
            found[name].add(span)
    return found


def slowest_of_pp_rank(ranks: Sequence[MeasuredRank], pp_rank: int) -> MeasuredRank:
    """Of a pipeline rank's GPUs, the rank with the most work of its own: others wait for it."""
    return max((r for r in ranks if r.recording.pp_rank == pp_rank), key=lambda r: (r.work, -r.recording.rank))


def op_rows(predicted: Prediction, ranks: Sequence[MeasuredRank], step: int, ceilings: Ceilings) -> list[OpRow]:
    """The rows of all pipeline ranks. `step`: picoseconds of the measured step."""
    pp_ranks = sorted({r.recording.pp_rank for r in ranks})
    return [row for pp_rank in pp_ranks for row in _of_pp_rank(predicted, ranks, pp_rank, step, ceilings)]


def _of_pp_rank(
    predicted: Prediction, ranks: Sequence[MeasuredRank], pp_rank: int, step: int, ceilings: Ceilings
) -> Iterator[OpRow]:
    by_rank = {r.recording.rank: (measured_by_name(r.recording), len(r.recording.steps)) for r in ranks
               if r.recording.pp_rank == pp_rank}  # fmt: skip
    chosen = slowest_of_pp_rank(ranks, pp_rank).recording.rank
    found, count = by_rank[chosen]
    planned = {name: op for (at, name), op in predicted.ops.items() if at == pp_rank}
    ops = _as_measured(planned, found)
    for name in [*found, *(name for name in ops if name not in found)]:
        op, here = ops.get(name), found.get(name)
        took = {r: _per_step(some[name].nanoseconds if name in some else 0, n) for r, (some, n) in by_rank.items()}
        measured, expected = took[chosen], op.picoseconds if op else 0
        if not measured and not expected:
            continue
        slowest = max(took, key=lambda r: took[r])
        flops, moved = (work.get((pp_rank, name), 0) for work in (predicted.flops, predicted.moved))
        held, reached = _ceiling(flops, moved, measured, ceilings)
        yield {
            "pp_rank": pp_rank, "rank": chosen, "stream": op.stream if op else "compute", "name": name,
            "part": part_of(name, predicted.parts), "matched": _matched(name, {*predicted.parts, *planned}, measured),
            "calls": round(here.calls / count) if here else op.calls if op else 0, "predicted": expected,
            "measured": measured, "share": measured / step if step else 0.0, "flops": flops, "bytes": moved,
            "ceiling": held, "reached": reached, "least": min(took.values()), "most": took[slowest],
            "slowest": slowest, "kernels": _kernels(here, count),
        }  # fmt: skip


def _per_step(nanoseconds: int, count: int) -> int:
    return round(1000 * nanoseconds / count)


def _matched(name: str, expected_names: Collection[str], measured: int) -> Literal["both", "predicted", "measured"]:
    if not measured:
        return "predicted"
    return "both" if all(part in expected_names for part in name.split(names.AND)) else "measured"


def _as_measured(planned: Mapping[str, PredictedOp], found: Iterable[str]) -> dict[str, PredictedOp]:
    """What is predicted by the names of the run, which posts several messages at once under all of their names."""
    ops = dict(planned)
    for name in found:
        if names.AND in name and (parts := [ops.pop(part) for part in name.split(names.AND) if part in ops]):
            took = sum(op.picoseconds for op in parts)
            ops[name] = PredictedOp(parts[0].stream, sum(op.calls for op in parts), took)
    return ops


def _ceiling(
    flops: int, moved: int, picoseconds: int, ceilings: Ceilings
) -> tuple[Literal["product", "copy", "none"], float]:
    """By which ceiling an op is held, and how much of it was reached."""
    by_product, by_copy = flops / ceilings["product"], moved / ceilings["copy"]
    if not picoseconds or not (flops or moved):
        return "none", 0.0
    return ("product" if by_product >= by_copy else "copy"), max(by_product, by_copy) * _PS / picoseconds


def _kernels(here: _Measured | None, count: int) -> list[KernelRow]:
    if here is None:
        return []
    return [
        {"name": name, "calls": round(here.calls_of[name] / count), "picoseconds": _per_step(took, count)}
        for name, took in here.kernels.most_common(_MOST_KERNELS)
    ]


def unmatched(rows: Sequence[OpRow], pp_rank: int, measured: int, predicted: int) -> Unmatched:
    """What only one side has, on one pipeline rank. A wait of a rank for what it has sent, or for other ranks, is
    predicted as idle time of compute: a run calls nothing there."""
    own = [row for row in rows if row["pp_rank"] == pp_rank]
    seen = sum(row["measured"] for row in own if row["matched"] == "measured")
    missing = sum(row["predicted"] for row in own if row["matched"] == "predicted")
    return {
        "measured": seen, "measured_share": seen / measured if measured else 0.0,
        "predicted": missing, "predicted_share": missing / predicted if predicted else 0.0,
    }  # fmt: skip

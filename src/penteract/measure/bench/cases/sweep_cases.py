"""From a question to its cases: each a run in full, with what is predicted of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple, cast

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.recompute import name_of
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.config.resolve.write_run_file import toml_value
from penteract.config.rules.case import KEYS
from penteract.config.rules.kernel_gpus import check_kernels_for
from penteract.config.rules.kernel_packages import packages_here
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.measure.bench.cases.case_prediction import Predictor
from penteract.measure.bench.cases.same_program import SamePrograms
from penteract.measure.bench.cases.sweep_question import PlanQuestion, SweepQuestion
from penteract.measure.schemas.sweep import SweepCase, Value
from penteract.model.count import parameters
from penteract.planner.ask import as_settings, as_text, parse_settings
from penteract.planner.plan import estimator, plan_layouts
from penteract.planner.question import question as ask_planner
from penteract.planner.report.runfile import as_run
from penteract.planner.search.collector import uncollected
from penteract.planner.settle_budget import settle_budget

Again = Callable[[list[str]], Resolved]
Settle = Callable[[Resolved, Again], Resolved]  # what nobody decided is chosen, as `penteract train` does
MOST_CASES = 10_000
_SHORT = {"micro_batch_size": "mbs", "global_batch_size": "gbs", "sequence_length": "seq", "recompute": "rc"}
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class ReadyCase:
    """A case, and the run that it is."""

    case: SweepCase
    run: Resolved


class Expanded(NamedTuple):
    """The cases, and combinations of a grid that break a rule, each with the rule."""

    cases: tuple[ReadyCase, ...]
    refused: tuple[tuple[str, str], ...]


class _Point(NamedTuple):
    origin: Literal["plan", "grid", "case"]
    varied: Mapping[str, Any]
    run: Resolved
    limit: float


def expand(asked: SweepQuestion, predictor: Predictor, settle: Settle = lambda run, again: run) -> Expanded:
    """All cases of a question. Raises BadInput, also where a single case of [[case]] breaks a rule."""
    refused = list[tuple[str, str]]()
    points = list(_planned(asked, asked.plan) if asked.plan else _own(asked, settle, refused))
    made = list(_without_repeated(points, predictor, refused))
    if not points:
        what = "each combination of the grid breaks a rule" if refused else "no cases"
        raise BadInput("SWEEP", what, where=asked.name, found=refused[0][1] if refused else "nothing",
                       fix="other values, or another number of ranks")  # fmt: skip
    return Expanded(tuple(made), tuple(refused))


def _without_repeated(
    points: Sequence[_Point], predictor: Predictor, refused: list[tuple[str, str]]
) -> Iterator[ReadyCase]:
    """The cases, without combinations of a grid that are the program of an earlier one, which go to `refused`: their
    difference would be noise."""
    number, earlier = 1, SamePrograms()
    for point in points:
        made = _ready(number, point, predictor)
        run, allocated = made.run.run, made.case.predicted.allocated_bytes
        same = earlier.of(made.case.name, run, allocated) if point.origin == "grid" else ""
        if same:
            refused.append((_slug(point.varied), f"the same program as {same}"))
            continue
        number += 1
        yield made


# ---- runs of a base ------------------------------------------------------------------------------------------------


def _own(asked: SweepQuestion, settle: Settle, refused: list[tuple[str, str]]) -> Iterator[_Point]:
    """The grid's combinations, then the single cases. A combination that breaks a rule goes to `refused`."""
    ranks = asked.ranks or (cluster(asked.gpus).gpus if asked.gpus else None)
    combinations = product(*asked.grid.values()) if asked.grid else ()
    if asked.grid:
        _check_size(asked)
    for values in combinations:
        varied = dict(zip(asked.grid, values, strict=True))
        try:
            yield _Point("grid", varied, _resolved(asked, varied, ranks, settle), asked.limit)
        except BadInput as bad:
            refused.append((_slug(varied), f"{bad.what}, {bad.where}".rstrip(", ")))
    for number, case in enumerate(asked.cases, 1):
        try:
            made = _resolved(asked, case.values, ranks, settle)
        except BadInput as bad:
            bad.where = f"case {number}: {bad.where}"
            raise
        yield _Point("case", case.values, made, case.limit or asked.limit)


def _check_size(asked: SweepQuestion) -> None:
    size = len(asked.cases)
    for values in asked.grid.values():
        size = max(size, 1) * len(values)
    if size > MOST_CASES:
        raise BadInput("SWEEP", "more cases than a sweep holds", where=asked.name, found=size, allowed=MOST_CASES,
                       fix="fewer values")  # fmt: skip


def _resolved(asked: SweepQuestion, values: Mapping[str, Any], ranks: int | None, settle: Settle) -> Resolved:
    # Random samples fill their sequences, so kernels that take whole ones alone will do.
    own = ["data.pack_documents=false"] if asked.data == "random" else []
    own += [*asked.words, *(f"{key}={toml_value(value)}" for key, value in values.items())]

    def again(more: list[str]) -> Resolved:
        return resolve(asked.run or None, asked.preset or None, [*more, *own], ranks)

    made = settle_budget(settle(again([]), again))[0]
    if asked.gpus and (gpu := cluster(asked.gpus).gpu) is not None:
        check_kernels_for(
            made.run.model, made.run.layout, gpu, lambda setting: KEYS[setting], lambda setting: "another kernel"
        )
    return made


# ---- layouts of a plan ---------------------------------------------------------------------------------------------


def _planned(asked: SweepQuestion, plan: PlanQuestion) -> Iterator[_Point]:
    """The first layouts of a plan, in its order. `varied`: the settings in which they differ."""
    ask = ask_planner(
        plan.model, plan.gpus, sequence_length=plan.seq, batch=plan.batch, precision=plan.precision,
        optimizer=plan.optimizer, headroom=plan.headroom,
        pins=parse_settings(plan.fix, flag="--fix", several=True) if plan.fix else {},
        packages=plan.packages or packages_here(),
    )  # fmt: skip
    with uncollected():
        found = plan_layouts(ask, estimator, top=plan.top, number=1)
    settings = [as_settings(one.layout) for one in found.layouts]
    for one, own in zip(found.layouts, settings, strict=True):
        made = as_run(replace(ask, precision=one.estimate.precision, also=()), one.layout)
        rates = made.run.lr_schedule
        rates = replace(rates, warmup_steps=max(rates.warmup_steps, asked.warmup))
        varied = {
            KEYS[setting]: value
            for setting, value in own.items()
            if any(other.get(setting) != value for other in settings)
        }
        yield _Point("plan", varied, replace(made, run=replace(made.run, lr_schedule=rates)), asked.limit)


# ---- a case --------------------------------------------------------------------------------------------------------


def _ready(number: int, point: _Point, predictor: Predictor) -> ReadyCase:
    run = point.run.run
    prediction, flops = predictor(run)
    slug = _slug(point.varied)
    case = SweepCase(
        name=f"{number:03d}_{slug}" if slug else f"{number:03d}", number=number, origin=point.origin,
        varied={key: _plain(value) for key, value in point.varied.items()}, model=run.model.name,
        parameters=parameters(run.model).total, layout=as_settings(run.layout), layout_text=_text(run),
        ranks=run.layout.world, limit_s=point.limit, precision=run.precision.dtype,
        global_batch_size=run.layout.global_batch_size, sequence_length=run.sequence_length, model_flops=flops.full,
        model_flops_causal=flops.causal, predicted=prediction,
    )  # fmt: skip
    return ReadyCase(case, point.run)


def _text(run: RunSpec) -> str:
    """The layout as `--layout` takes it. Kernels are a run's own, not what a plan has by default, so they are said."""
    return as_text(run.layout, Layout())


def _slug(varied: Mapping[str, Any]) -> str:
    """A name for a folder: tp2_zero1. A model's sizes come last, where a long name ends."""
    parts = list[str]()
    for key, value in sorted(varied.items(), key=lambda one: one[0].startswith("model.")):
        name = key.rpartition(".")[2]
        plain = re.sub(r"[^A-Za-z0-9.+-]+", "-", str(_plain(value)))
        parts.append(f"{_SHORT.get(name, name.replace('_', '-'))}{'-' * plain[:1].isalpha()}{plain}")
    return "_".join(parts)[:_LONGEST_NAME].rstrip("._-")


def _plain(value: Any) -> Value:
    """A value of JSON: lists as text."""
    if isinstance(value, (list, tuple)):
        words = tuple(map(str, cast("Sequence[object]", value)))
        named = name_of(words)
        return named if isinstance(named, str) else "+".join(words)
    return value

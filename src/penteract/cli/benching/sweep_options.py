"""The question of `penteract bench`: a sweep's file, or options that make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penteract.config.files.keys import find_key
from penteract.config.files.read import read_overrides
from penteract.config.hardware import HEADROOM
from penteract.config.rules.case import KEYS
from penteract.errors import BadInput
from penteract.measure.bench.cases.sweep_file import FILE, OF_CASES, is_sweep, read_sweep
from penteract.measure.bench.cases.sweep_question import PlanQuestion, SweepQuestion, Values

OUT = "sweeps"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """The options, None where one was not given."""

    grid: Sequence[str]
    top: int | None
    plan: Mapping[str, Any]  # options of `plan`
    settings: Mapping[str, Any]  # gpus, ranks, steps, warmup, limit, budget, headroom, data
    words: Sequence[str]


def question_of(target: str, options: SweepOptions) -> SweepQuestion:
    """What is asked. Raises BadInput."""
    given = {k: v for k, v in options.settings.items() if v is not None}
    given = FILE.check(given, "", lambda name: f"--{name}")
    plan = {k: v for k, v in options.plan.items() if v is not None}
    read_overrides(options.words)  # refuses unknown keys
    path = Path(target)
    if path.suffix == ".toml" and is_sweep(path):
        if other := [*plan, *["grid"] * bool(options.grid), *["top"] * (options.top is not None)]:
            raise BadInput("USAGE", "the sweep's file says that", where=f"--{other[0]}", found=target,
                           fix="write it into the file")  # fmt: skip
        made = replace(read_sweep(path), **given)
        if options.words and made.plan:
            raise _fixed(options.words[0])
        if made.plan and (own := [key for key in OF_CASES if key in given]):
            raise BadInput("USAGE", "the table [plan] says that", where=f"--{own[0]}", found=target,
                           fix="write it into the file")  # fmt: skip
        return replace(made, words=(*made.words, *options.words))
    if options.top is not None:
        return _of_plan(target, options, given, plan)
    if plan:
        raise BadInput("USAGE", "an option of a plan's question", where=f"--{next(iter(plan))}", found="no --top",
                       fix="--top 20")  # fmt: skip
    if not options.grid:
        raise BadInput("USAGE", "one case is no sweep", found=target or "nothing",
                       allowed="SWEEP.toml, --grid key=a/b/c, or --top 20",
                       fix="penteract bench tiny --grid parallel.tp=1/2")  # fmt: skip
    is_file = path.suffix == ".toml"
    return SweepQuestion(
        name=_name(target), run=target if is_file else "", preset="" if is_file else target, words=tuple(options.words),
        grid=read_grid(options.grid), **given,
    )  # fmt: skip


def _of_plan(target: str, options: SweepOptions, given: dict[str, Any], plan: dict[str, Any]) -> SweepQuestion:
    if not target or not given.get("gpus"):
        raise BadInput("USAGE", "a plan needs a model and GPUs", where="--top", found=target or "no model",
                       fix="penteract bench llama-3.2-1b --gpus 4xH200 --top 20")  # fmt: skip
    if options.grid:
        raise BadInput("USAGE", "a plan's layouts, or a grid", where="--grid", found="--top",
                       fix="--fix holds settings of a plan: --fix tp=1/2")  # fmt: skip
    if options.words:
        raise _fixed(options.words[0])
    if "ranks" in given:
        raise BadInput("USAGE", "a plan's layouts use all GPUs", where="--ranks", found=given["ranks"],
                       fix="--gpus with so many")  # fmt: skip
    headroom = given.pop("headroom", HEADROOM)
    asked = PlanQuestion(model=target, gpus=given.pop("gpus"), top=options.top or 10, headroom=headroom, **plan)
    return SweepQuestion(name=_name(target), plan=asked, **given)


def _name(target: str) -> str:
    """Of the sweep of a run file or a model. llama-3.2-1b is no file with a suffix."""
    path = Path(target)
    return path.stem if path.suffix in (".toml", ".json") else path.name


def _fixed(word: str) -> BadInput:
    return BadInput("USAGE", "a plan's layouts are taken as they are", found=word, fix="--fix holds settings of a plan")


def read_grid(words: Sequence[str]) -> dict[str, Values]:
    """`parallel.tp=1/2/4`, or a setting as `tp=1/2/4`, as key -> values. Raises BadInput."""
    found = dict[str, Values]()
    for word in words:
        name, equals, text = word.partition("=")
        name = KEYS.get(name.strip(), name.strip())
        find_key(name, "--grid")
        values = [one.strip() for one in text.split("/")]
        if not equals or not all(values):
            raise BadInput("USAGE", "a grid's key takes values", where="--grid", found=word, fix=f"--grid {name}=1/2")
        if name in found:
            raise BadInput("USAGE", "a grid's key is given twice", where="--grid", found=word, fix="keep one")
        try:
            found[name] = tuple(read_overrides([f"{name}={value}"])[name].value for value in values)
        except BadInput as bad:
            if bad.fix or "," not in text:
                raise
            fix = f"--grid {name}={text.replace(',', '/')}"
            raise BadInput(bad.code, bad.what, where=bad.where, found=bad.found, allowed=bad.allowed, fix=fix) from bad
    return found

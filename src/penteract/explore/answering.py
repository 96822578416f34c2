"""The entry: a request of the page -> its answers, one or a stream of them. Errors are answers too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

from penteract._version import __version__
from penteract.config.resolve.presets import PRESETS
from penteract.config.rules.legal import problems
from penteract.config.rules.nearest import repair
from penteract.errors import BadInput, PenteractError
from penteract.explore.answers.controls import groups, names
from penteract.explore.answers.glossary import TERMS
from penteract.explore.answers.memory_figures import figures
from penteract.explore.answers.questions import Asked, changed, read_question
from penteract.explore.answers.settings import Settings
from penteract.explore.schemas.page_schema import (
    VERSION,
    Answer,
    BrokenRule,
    CatalogueModel,
    ErrorAnswer,
    Kind,
    MemoryAnswer,
    Opening,
    Question,
    Repair,
    RunFile,
)
from penteract.explore.schemas.search_schema import SearchProgress
from penteract.model.count import parameters
from penteract.planner.plan import case_of, estimator, plan_one
from penteract.planner.report.as_json import as_dict
from penteract.planner.report.host_room import HostRoom
from penteract.planner.report.memory_by_line import fullest_pp_rank, memory_by_line
from penteract.planner.report.models_table import catalogue_rows
from penteract.planner.report.runfile import run_file
from penteract.planner.search.best import Timed
from penteract.planner.search.collector import uncollected
from penteract.units import show_count

if TYPE_CHECKING:
    from penteract.explore.answers.profiles.profile_answer import GivenProfiles
    from penteract.explore.measured_sweeps.read_sweeps import SweepFolders

Tell = Callable[[SearchProgress], object]
_FLAGS = {
    "--seq": "sequence_length", "--batch": "global_batch_size", "--precision": "precision", "--optimizer": "optimizer",
    "--headroom": "headroom", "--gpus": "gpu", "model": "model", "--tokens": "tokens",
    "--usd-per-gpu-hour": "usd_per_gpu_hour",
}  # fmt: skip


def answer(
    request: object,
    opening: Question,
    tell: Tell | None = None,
    profiles: GivenProfiles | None = None,
    sweeps: SweepFolders | None = None,
) -> Iterator[Answer]:
    """The answers to one request. A stream's rows come one by one.

    opening   the question of an opening request
    tell      called with what a search has found so far, while it searches
    profiles  those of folders that a server was given; `sweeps` likewise, or those of an exported page
    """
    try:
        with uncollected():
            asked = _checked(request)
            if (found := _about_measurements(asked, profiles, sweeps)) is not None:
                yield found
                return
            yield from _answers(asked, opening, tell)
    except PenteractError as error:
        yield _error(error)
    except RecursionError:
        yield _error(BadInput("QUESTION", "nested too deeply", where="question"))


def _checked(request: object) -> dict[str, Any]:
    if not isinstance(request, dict):
        raise BadInput("QUESTION", "not a request", found=type(request).__name__, allowed="an object")
    tree = cast("dict[str, Any]", request)
    if tree.get("version") != VERSION:
        raise BadInput("VERSION", "another version of the page", found=str(tree.get("version"))[:20], allowed=VERSION,
                       fix="reload the page")  # fmt: skip
    for name, what in (("pp_rank", "no pipeline rank"), ("rank", "no rank")):
        at = tree.get(name)
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise BadInput("QUESTION", what, where=name, found=str(at)[:20], allowed="a number")
    return tree


def _answers(request: dict[str, Any], opening: Question, tell: Tell | None) -> Iterator[Answer]:
    kind = request.get("kind")
    if kind == "opening":
        yield _opening(opening)
        return
    if kind == "runs":  # a server that was given a folder answers this itself
        from penteract.explore.training_runs.run_answer import not_served

        yield not_served()
        return
    if kind not in get_args(Kind):
        raise BadInput("QUESTION", "no such request", where="kind", found=str(kind)[:20],
                       allowed=", ".join(get_args(Kind)))  # fmt: skip
    asked = read_question(request.get("question"))
    if kind == "memory":
        yield _memory(asked, request.get("pp_rank"))
        return
    if kind in ("search", "what_if", "compare"):
        yield from _layouts(kind, asked, request, tell)
        return
    plan = plan_one(asked.ask, asked.settings, estimator)
    timed = plan.best
    if kind == "step":
        from penteract.explore.answers.step_curve import step_curve  # imported here: the first picture does without

        yield step_curve(plan, timed, _pp_rank(request.get("pp_rank"), timed))
    elif kind == "fits":
        from penteract.explore.answers.would_fit import would_fit

        yield from would_fit(asked.page, plan, timed)
    elif kind == "schedule":
        from penteract.explore.answers.schedules.schedule_lanes import schedule_lanes

        yield schedule_lanes(asked.page, plan, timed, _pp_rank(request.get("pp_rank"), timed))
    elif kind == "schedules":
        from penteract.explore.answers.schedules.other_schedules import other_schedules

        yield from other_schedules(asked.page, timed)
    elif kind == "ranks":
        from penteract.explore.answers.ranks.rank_answer import ranks_answer

        yield ranks_answer(asked, plan, timed, request.get("rank") or 0, str(request.get("parameter") or ""))
    else:
        name = "run.toml"
        background = HostRoom.of(plan, timed).saves_in_background
        yield _run_file(name, run_file(asked.ask, timed.layout, timed.time.seconds, name, background=background))


def _about_measurements(
    request: dict[str, Any], profiles: GivenProfiles | None, sweeps: SweepFolders | None
) -> Answer | None:  # fmt: skip
    """The answer about files that measurements left; None for another request."""
    if request.get("kind") == "profile":
        from penteract.explore.answers.profiles.profile_answer import profile_answer

        return profile_answer(request, profiles)
    if request.get("kind") == "bench":
        from penteract.explore.measured_sweeps.bench_answer import bench_answer

        return bench_answer(sweeps, request.get("bench"))
    return None


def _layouts(kind: str, asked: Asked, request: dict[str, Any], tell: Tell | None) -> Iterator[Answer]:
    """The answers of the Layouts view."""
    from penteract.explore.answers.layouts.asked import searched  # imported here, as those of other views

    wanted = searched(asked, request.get("search"))
    if kind == "search":
        from penteract.explore.answers.layouts.search import search_answers

        yield from search_answers(wanted, tell)
    elif kind == "what_if":
        from penteract.explore.answers.layouts.other_questions import other_questions

        yield from other_questions(wanted)
    else:
        from penteract.explore.answers.layouts.side_by_side import side_by_side

        yield side_by_side(wanted)


def _run_file(name: str, text: str) -> RunFile:
    return {"version": VERSION, "kind": "run_file", "name": name, "text": text}


def _opening(question: Question) -> Opening:
    models: list[CatalogueModel] = [
        {"name": row["name"], "text": f"{row['name']} · {show_count(row['parameters'])}", "source": row["source"]}
        for row in (*_presets(), *catalogue_rows())
    ]
    return {
        "version": VERSION, "kind": "opening", "program": f"penteract {__version__}", "question": question,
        "models": models, "controls": groups(), "terms": dict(TERMS),
    }  # fmt: skip


def _presets() -> Iterator[dict[str, Any]]:
    """The small models, which the catalogue does not have."""
    for name, preset in PRESETS.items():
        yield {"name": name, "parameters": parameters(preset.model).total, "source": "for learning"}


def _memory(asked: Asked, pp_rank: int | None) -> MemoryAnswer:
    case, settle = case_of(asked.ask, asked.settings)
    settings = Settings(asked, case).all()
    plan, broken, mended = None, list[BrokenRule](), None
    try:
        plan = plan_one(asked.ask, asked.settings, estimator)
    except BadInput as error:
        if error.code not in ("LAYOUT", "OP", "BUDGET", "KERNEL"):
            raise
        broken = _broken(asked, error)
        mended = _repair(asked, repair(replace(case, world=None), settle)) if error.code == "LAYOUT" else None
    found: MemoryAnswer = {
        "version": VERSION, "kind": "memory", "question": asked.page, "command": asked.command, "settings": settings,
        "broken": broken, "repair": mended, "plan": None, "figures": None,
    }  # fmt: skip
    if plan:
        timed = plan.best
        at, most = _pp_rank(pp_rank, timed), fullest_pp_rank(timed)
        rows = memory_by_line(plan, timed, most)
        found["plan"] = as_dict(plan) | {"terms": rows.as_dict()}  # as `--why 1 --json` prints it
        found["figures"] = figures(plan, timed, at, rows if at == most else memory_by_line(plan, timed, at))
    return found


def _pp_rank(pp_rank: int | None, timed: Timed) -> int:
    """The pipeline rank asked for, if the layout has it; else the fullest."""
    return pp_rank if pp_rank is not None and 0 <= pp_rank < timed.layout.pp else fullest_pp_rank(timed)


def _broken(asked: Asked, error: BadInput) -> list[BrokenRule]:
    """Every rule that the layout breaks; else the error alone."""
    case, settle = case_of(asked.ask, asked.settings)
    found = problems(
        case.model, case.layout, case.sequence_length, global_batch_size=case.global_batch_size, settle=settle
    )
    if not found:
        at = error.where.rpartition(" ")[2]
        return [
            {"control": _control(at if at != "--layout" else "tp"), "text": _one_line(error), "allowed": error.allowed}
        ]
    return [{"control": _control(p.setting), "text": p.what, "allowed": ", ".join(map(str, p.allowed))} for p in found]


def _control(setting: str) -> str:
    """The control of a setting; empty if it has none."""
    setting = "global_batch_size" if setting == "gradient_accumulation_steps" else setting
    return next((name for name in names() if name.rpartition(".")[2] == setting), "")


def _repair(asked: Asked, changes: dict[str, Any]) -> Repair | None:
    """The repaired question, if what it changes is on the page."""
    if not changes or not all(map(_control, changes)):
        return None
    other = changed(asked.page, changes)
    try:
        read_question(other)
    except BadInput:
        return None
    text = ", ".join(f"{setting} = {value}" for setting, value in changes.items())
    return {"text": text, "question": other}


def _one_line(error: PenteractError) -> str:
    found = f": {error.found}" if error.found else ""
    return f"{error.what}{found}"


def _error(error: PenteractError) -> ErrorAnswer:
    at = error.where.partition(" ")[0]
    setting = error.where.rpartition(" ")[2] if at == "--layout" else ""
    control = _FLAGS.get(at, "") or (_control(setting) if setting else "")
    return {"version": VERSION, "kind": "error", "text": str(error), "error": error.as_dict(), "control": control}

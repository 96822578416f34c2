"""A question of the Layouts view as a question to the planner: what `penteract plan --fix` makes of its command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

from penteract.errors import BadInput
from penteract.explore.answers.controls import TEXTS, WORDS
from penteract.explore.answers.questions import Asked
from penteract.explore.schemas.page_values import Value
from penteract.explore.schemas.search_schema import SearchOptions, SettingFilter
from penteract.planner.ask import RECOMPUTE, Ask, Values, as_word, parse_settings
from penteract.planner.options import check_options
from penteract.planner.plan import Plan
from penteract.planner.report.as_json import budget
from penteract.planner.report.as_text import spent
from penteract.planner.search.best import Timed
from penteract.planner.space.layouts import divisors
from penteract.units import parse_count

LABELS: Mapping[str, str] = {
    "dp": "Data", "tp": "Tensor", "pp": "Pipeline", "cp": "Context", "ep": "Expert", "zero": "ZeRO",
    "schedule": "Schedule", "recompute": "Recompute", "micro_batch_size": "Micro-batch",
}  # fmt: skip
_DIMENSIONS = ("dp", "tp", "pp", "cp", "ep")
_MOST_VALUES, _LONGEST, _LARGEST = 64, 40, 64
NONE: SearchOptions = {"fix": {}, "tokens": "", "usd_per_gpu_hour": 0, "against": None}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request. `ask`: what `penteract plan` makes of `command`; `tokens`: 0 if no costs are asked for."""

    asked: Asked
    ask: Ask
    options: SearchOptions
    tokens: int

    @property
    def command(self) -> str:
        """The command line of the same search."""
        fix = fix_text(self.options["fix"])
        words = ["--fix", fix] * bool(fix)
        if self.tokens:
            words += ["--tokens", self.options["tokens"]]
            usd = self.options["usd_per_gpu_hour"]
            words += ["--usd-per-gpu-hour", str(usd)] * (usd > 0)
        return self.asked.command_with(*words)

    def cost(self, plan: Plan, timed: Timed) -> str:
        """GPU-hours, days and cost of the training at the speed of a layout, as the planner prints it; or empty."""
        if not self.tokens:
            return ""
        found = budget(plan, timed, self.tokens, self.usd)
        return spent(found, timed.layout.world)

    @property
    def usd(self) -> float | None:
        """The price of a GPU's hour, if it is known."""
        return self.options["usd_per_gpu_hour"] or None


def searched(asked: Asked, given: object) -> Wanted:
    """The request's options, checked. Raises BadInput, as the command line does for the same mistake."""
    options = _typed(given)
    pins = _pins(options["fix"])
    tokens = _count(options["tokens"])
    if options["usd_per_gpu_hour"]:
        check_options(usd_per_gpu_hour=options["usd_per_gpu_hour"])
    return Wanted(asked, replace(asked.ask, pins=pins), options, tokens)


def fix_text(fix: Mapping[str, list[Value]]) -> str:
    """The text of `--fix`."""
    short = {"micro_batch_size": "mbs"}
    return ",".join(
        f"{short.get(setting, setting)}={'/'.join(map(as_word, values))}" for setting, values in fix.items()
    )


def _pins(fix: Mapping[str, list[Value]]) -> Mapping[str, Values]:
    return parse_settings(fix_text(fix), flag="--fix", several=True)


def _typed(given: object) -> SearchOptions:
    """The options with exactly their keys, each of its type; all of them may be left out."""
    if given is None:
        return NONE
    tree = cast("dict[str, Any]", given) if isinstance(given, dict) else {"a value": given}
    if unknown := tree.keys() - NONE.keys():
        raise _wrong("search", min(map(str, unknown)), ", ".join(NONE))
    found = cast("SearchOptions", {**NONE, **tree})
    fix, usd = cast("Any", found["fix"]), cast("Any", found["usd_per_gpu_hour"])
    if not isinstance(fix, dict) or not all(map(_is_choice, cast("dict[str, Any]", fix).items())):
        raise _wrong("search.fix", "other values", f"lists of values of {', '.join(LABELS)}")
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not isfinite(usd) or usd < 0:
        raise _wrong("search.usd_per_gpu_hour", usd, "a number from 0 up")
    if not isinstance(cast("Any", found["tokens"]), str) or len(found["tokens"]) > _LONGEST:
        raise _wrong("search.tokens", found["tokens"], "a text such as 15T")
    if found["against"] is not None and not isinstance(cast("Any", found["against"]), dict):
        raise _wrong("search.against", found["against"], "the settings of a layout")
    return found


def _is_choice(item: tuple[Any, Any]) -> bool:
    """Whether this is a setting of the filters, with some values of it."""
    setting, values = item
    if setting not in LABELS or not isinstance(values, list):
        return False
    words = cast("list[Any]", values)
    return 0 < len(words) <= _MOST_VALUES and all(
        isinstance(v, int | str) and not isinstance(v, bool) and not {*str(v)} & {*",=/"} and len(str(v)) <= _LONGEST
        for v in words
    )


def _wrong(where: str, found: object, allowed: str) -> BadInput:
    return BadInput("QUESTION", "not what a search has", where=where, found=str(found)[:_LONGEST], allowed=allowed)


def _count(text: str) -> int:
    """A number of tokens; 0 for none."""
    if not text.strip():
        return 0
    try:
        count = parse_count(text.strip())
    except ValueError:
        raise BadInput("VALUE", "not a number of tokens", where="--tokens", found=text, fix="--tokens 15T") from None
    check_options(tokens=count)
    return count


def filters(ask: Ask) -> list[SettingFilter]:
    """The settings that a search can hold, with the values to choose from."""
    gpus, experts = divisors(ask.cluster.gpus), ask.model.moe.experts if ask.model.moe else 1
    values: dict[str, tuple[Value, ...]] = {
        **dict.fromkeys(_DIMENSIONS, tuple(gpus)),
        "tp": tuple(n for n in gpus if ask.model.heads % n == 0),
        "pp": tuple(n for n in gpus if n <= ask.model.layers),
        "ep": tuple(n for n in gpus if experts % n == 0) if ask.model.moe else (),
        "zero": tuple(WORDS["zero"]), "schedule": tuple(WORDS["schedule"]), "recompute": tuple(RECOMPUTE),
        "micro_batch_size": tuple(n for n in divisors(ask.global_batch_size) if n <= _LARGEST),
    }  # fmt: skip
    return [
        {
            "setting": setting, "label": label, "dimension": setting if setting in _DIMENSIONS else "",
            "values": [{"value": v, "text": TEXTS.get(str(v), str(v))} for v in values[setting]],
        }
        for setting, label in LABELS.items()
        if len(values[setting]) > 1
    ]  # fmt: skip

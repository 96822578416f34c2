"""Refuse pinned values that no layout has, with the nearest values that some layout has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from math import log2
from typing import Any

from penteract.config.layout import CP_METHODS, DETERMINISM, EP_METHODS, EXPERT_ROWS, ZERO_STAGES
from penteract.errors import BadInput
from penteract.planner.ask import Ask, Values, as_word
from penteract.planner.space.layouts import Space, divisors
from penteract.schedule.registry import SCHEDULES

_SHOWN = 2  # values in the fix
_TRIED = 4  # nearest values of a setting that are tried


def refuse_pins(ask: Ask, what: str = "") -> None:
    """Raise BadInput. `what`: why no layout is legal; by default, no layout uses exactly these GPUs."""
    gpus = ask.cluster.gpus
    allowed = f"dp·tp·pp·cp = the {ask.devices(2)}, and schedules and context methods where pp and cp are more than 1"
    raise BadInput("SETTING", what or f"no layout of {gpus} {ask.devices(gpus)} has these values", where="--fix",
                   found=_written(ask.pins), allowed="" if what else allowed, fix=_fix(ask))  # fmt: skip


def _fix(ask: Ask) -> str:
    """The pins with other values of one setting: the first setting for which that is enough."""
    for setting, held in ask.pins.items():
        found = tuple(islice((v for v in _near(ask, setting, held)[:_TRIED] if _some(ask, setting, v)), _SHOWN))
        if found:
            return f"--fix {_written({**ask.pins, setting: _sorted(found)})}"
    return "leave one out"


def _some(ask: Ask, setting: str, value: Any) -> bool:
    """Whether some layout has the value, with the other settings pinned as they are."""
    families = Space(replace(ask, pins={**ask.pins, setting: (value,)})).families(Counter())
    return next(families, None) is not None


def _near(ask: Ask, setting: str, held: Values) -> list[Any]:
    """Possible values of a setting on so many GPUs, those nearest to the pinned ones first."""
    gpus, batch = divisors(ask.cluster.gpus), divisors(ask.global_batch_size)
    possible: dict[str, Iterable[Any]] = {
        **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "expert_tp", "shard_group"), gpus),
        "vpp": range(1, ask.model.layers + 1), "last_stage_less_layers": range(ask.model.layers),
        "micro_batch_size": batch, "zero": ZERO_STAGES, "schedule": SCHEDULES,
        "cp_method": CP_METHODS, "ep_method": EP_METHODS, "expert_rows": EXPERT_ROWS, "determinism": DETERMINISM,
        "reduce_scatter_once": (False, True), "reshard_after_step": (False, True),
    }  # fmt: skip

    def distance(value: Any) -> float:
        return 0 if isinstance(value, str) else min(abs(log2((value + 1) / (v + 1))) for v in held)

    return sorted((v for v in possible.get(setting, ()) if v not in held), key=distance)


def _sorted(values: Values) -> Values:
    """Numbers in ascending order; words in their order."""
    return values if isinstance(values[0], str) else tuple(sorted(values))


def _written(pins: Mapping[str, Values]) -> str:
    """Pins as text for `--fix`."""
    return ",".join(f"{setting}={'/'.join(map(as_word, values))}" for setting, values in pins.items())

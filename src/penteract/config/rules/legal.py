"""Refuses an illegal layout before anything starts, with the nearest legal one.

The rules are arithmetic only. The engine itself refuses what it cannot run yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import KEYS, Case
from penteract.config.rules.nearest import allowed_values, repair
from penteract.config.rules.settle import Settle
from penteract.errors import BadInput

_AS_IT_IS = Settle()
_SHOWN = 3  # problems on a terminal; `BadLayout.problems` has them all


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule. `allowed`: the nearest values of `setting`, closest first, that keep its rules.

    `fix`: flags that make the whole layout legal; the same on every problem, as problems share a repair.
    """

    setting: str
    what: str
    found: object
    allowed: tuple[object, ...]
    fix: str

    @property
    def key(self) -> str:
        """The key of a run file that holds the setting."""
        return KEYS[self.setting]


class BadLayout(BadInput):
    """The layout is illegal. `problems` has every broken rule."""

    def __init__(self, problems: list[Problem], origins: Mapping[str, str]) -> None:
        """The first of `problems` heads the message. `origins`: key of a run file -> the place that set it."""
        self.problems = tuple(problems)
        first, *rest = problems
        self._rest = [_error(p, origins, fix="") for p in rest[: _SHOWN - 1]]
        head = _error(first, origins, fix=first.fix)
        super().__init__("LAYOUT", head.what, where=head.where, found=head.found, allowed=head.allowed, fix=head.fix)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *map(str, self._rest)])

    def as_dict(self) -> dict[str, object]:
        return super().as_dict() | {"problems": [asdict(p) for p in self.problems]}


def _error(problem: Problem, origins: Mapping[str, str], *, fix: str) -> BadInput:
    origin = origins.get(problem.key)
    where = f"{problem.key} ({origin})" if origin else problem.key
    allowed = ", ".join(map(as_word, problem.allowed))
    return BadInput("LAYOUT", problem.what, where=where, found=problem.found, allowed=allowed, fix=fix)


def as_word(value: object) -> str:
    """A value as the command line takes it."""
    return ",".join(map(str, cast("tuple[object, ...]", value))) or "none" if isinstance(value, tuple) else str(value)


def problems(
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    *,
    global_batch_size: int | None = None,
    world: int | None = None,
    settle: Settle = _AS_IT_IS,
) -> list[Problem]:
    """Every broken rule of a layout, the most basic first; an empty list means legal.

    `global_batch_size` (sequences) and `world` (ranks) are compared with the layout if given.
    `settle` derives what the user left open again, after each change that the search for a fix tries.
    """
    case = Case(
        model=model, layout=layout, sequence_length=sequence_length, global_batch_size=global_batch_size, world=world
    )  # fmt: skip
    found = breaches(case)
    if not found:
        return []
    fix = " ".join(f"--{KEYS[setting]} {as_word(value)}" for setting, value in repair(case, settle).items())
    allowed = {setting: allowed_values(case, setting, settle) for setting in {setting for setting, _ in found}}
    return [
        Problem(setting=setting, what=what, found=case.get(setting), allowed=allowed[setting], fix=fix)
        for setting, what in found
    ]


def check_legal(
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    *,
    global_batch_size: int | None = None,
    world: int | None = None,
    settle: Settle = _AS_IT_IS,
    origins: Mapping[str, str] | None = None,
) -> None:
    """Raise BadLayout unless `problems` finds none. `origins`: key -> the place that set it, for the message."""
    found = problems(
        model, layout, sequence_length, global_batch_size=global_batch_size, world=world, settle=settle
    )  # fmt: skip
    if found:
        raise BadLayout(found, origins or {})

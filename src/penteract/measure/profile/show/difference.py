"""Two profiles: which parts and which ops make the difference."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypedDict

from penteract.measure.profile.show.profile_text import show
from penteract.measure.schemas.profile import ProfileFile

_MOST = 20


class OpChange(TypedDict):
    """An op of two profiles: picoseconds of the step in each, on the slowest rank of its stage."""

    stage: int
    name: str
    before: int
    after: int


def changes(before: ProfileFile, after: ProfileFile) -> list[OpChange]:
    """All ops of both, those that changed most first."""
    one, other = _by_name(before), _by_name(after)
    rows: list[OpChange] = [
        {"stage": stage, "name": name, "before": one[stage, name], "after": other[stage, name]}
        for stage, name in dict.fromkeys([*one, *other])
    ]
    return sorted(rows, key=lambda row: -abs(row["after"] - row["before"]))


def as_difference(before: ProfileFile, after: ProfileFile, *, every: bool = False, json: bool = False) -> str:
    """The difference of two profiles as text, or as a JSON object."""
    if json:
        steps = {"before": before["step"]["measured"], "after": after["step"]["measured"]}
        parts = {name: {"before": a, "after": b} for name, (a, b) in _parts(before, after).items()}
        return json_module.dumps({"version": 1, "kind": "profile_difference", "step": steps, "parts": parts,
                                  "ops": changes(before, after)})  # fmt: skip
    return "\n".join(_lines(before, after, every=every))


def _lines(before: ProfileFile, after: ProfileFile, *, every: bool) -> Iterator[str]:
    was, now = before["step"]["measured"], after["step"]["measured"]
    change = now / was - 1
    yield f"Before: {_about(before)}"
    yield f"After:  {_about(after)}"
    word = "slower" if change > 0 else "faster"
    yield f"The step is {abs(change):.1%} {word}: {show(was)}, then {show(now)}{_noise(before, after)}."
    yield ""
    yield f"{'Parts of the profiled step':<52} {'before':>10} {'after':>10} {'change':>10}"
    for name, (a, b) in sorted(_parts(before, after).items(), key=lambda item: -abs(item[1][1] - item[1][0])):
        yield f"{name:<52} {show(a):>10} {show(b):>10} {show(b - a, '+'):>10}"
    yield ""
    rows = changes(before, after)
    yield f"{'Ops, the largest change first':<52} {'before':>10} {'after':>10} {'change':>10}"
    stages = len({row["stage"] for row in rows}) > 1
    for row in rows if every else rows[:_MOST]:
        name = f"{row['name']}, stage {row['stage']}" if stages else row["name"]
        a, b = row["before"], row["after"]
        yield f"{name[:52]:<52} {show(a):>10} {show(b):>10} {show(b - a, '+'):>10}"


def _about(profile: ProfileFile) -> str:
    run = profile["run"]
    return f"{run['model']} · {run['text']} · {run['world']} ranks · {profile['made']['date']}"


def _noise(before: ProfileFile, after: ProfileFile) -> str:
    """Whether the ranges of both profiles' bare steps overlap."""
    a, b = before["step"]["bare"], after["step"]["bare"]
    return "" if min(a) > max(b) or min(b) > max(a) else "; the ranges of their steps overlap, so it may be noise"


def _by_name(profile: ProfileFile) -> Counter[tuple[int, str]]:
    return Counter({(row["stage"], row["name"]): row["measured"] for row in profile["ops"]})


def _parts(before: ProfileFile, after: ProfileFile) -> Mapping[str, tuple[int, int]]:
    """The parts of the rank with the most work, in each profile."""
    one, other = (max(p["ranks"], key=lambda row: row["work"])["parts"] for p in (before, after))
    return {name: (one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}

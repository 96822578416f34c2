"""Two profiles: which parts and which ops make the difference."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator

from penteract.measure.profile.show.profile_text import show
from penteract.measure.schemas.profile import ProfileFile
from penteract.measure.schemas.profile_parts import changes, may_be_noise, part_changes
from penteract.units import show_pace

_MOST = 20


def as_difference(before: ProfileFile, after: ProfileFile, *, every: bool = False, json: bool = False) -> str:
    """The difference of two profiles as text, or as a JSON object."""
    if json:
        steps = {"before": before["step"]["measured"], "after": after["step"]["measured"]}
        parts = {name: {"before": a, "after": b} for name, (a, b) in part_changes(before, after).items()}
        return json_module.dumps({"version": 1, "kind": "profile_difference", "step": steps, "parts": parts,
                                  "ops": changes(before, after)})  # fmt: skip
    return "\n".join(_lines(before, after, every=every))


def _lines(before: ProfileFile, after: ProfileFile, *, every: bool) -> Iterator[str]:
    was, now = before["step"]["measured"], after["step"]["measured"]
    yield f"Before: {_about(before)}"
    yield f"After:  {_about(after)}"
    noise = "; the ranges of their steps overlap, so it may be noise" if may_be_noise(before, after) else ""
    yield f"The step {show_pace(now / was, verb=True)}: {show(was)}, then {show(now)}{noise}."
    yield ""
    yield f"{'Parts of the profiled step':<52} {'before':>10} {'after':>10} {'change':>10}"
    for name, (a, b) in sorted(part_changes(before, after).items(), key=lambda item: -abs(item[1][1] - item[1][0])):
        yield f"{name:<52} {show(a):>10} {show(b):>10} {show(b - a, '+'):>10}"
    yield ""
    rows = changes(before, after)
    yield f"{'Ops, the largest change first':<52} {'before':>10} {'after':>10} {'change':>10}"
    several = len({row["pp_rank"] for row in rows}) > 1
    for row in rows if every else rows[:_MOST]:
        name = f"{row['name']}, pipeline rank {row['pp_rank']}" if several else row["name"]
        a, b = row["before"], row["after"]
        yield f"{name[:52]:<52} {show(a):>10} {show(b):>10} {show(b - a, '+'):>10}"


def _about(profile: ProfileFile) -> str:
    run = profile["run"]
    return (
        f"{run['model']} · {run['text']} · {run['world']} rank{'s' * (run['world'] != 1)} · {profile['made']['date']}"
    )

"""Two profiles: which parts of the step and which ops make the difference."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.explore.answers.profiles.shown_times import part_of, safe, time_text
from penteract.explore.schemas.profile_schema import ProfileChange, ProfileComparison
from penteract.measure.schemas.profile import ProfileFile
from penteract.measure.schemas.profile_parts import LABELS, changes, may_be_noise, part_changes
from penteract.units import show_pace, show_whole

_MOST = 30  # ops


def two_profiles(a: ProfileFile, b: ProfileFile, names: tuple[str, str]) -> ProfileComparison:
    """B against A."""
    was, now = a["step"]["measured"], b["step"]["measured"]
    ops = [row for row in changes(a, b) if row["before"] != row["after"]]
    several = len({row["pp_rank"] for row in ops}) > 1
    parts = sorted(part_changes(a, b).items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    rest = len(ops) - _MOST
    return {
        "a": names[0], "b": names[1], "verdict": _verdict(a, b), "slower": now > was, "about": list(_about(a, b)),
        "parts": [
            _change(safe(name), LABELS.get(name, safe(name)), before, after, was) for name, (before, after) in parts
        ],
        "ops": [
            _change(safe(row["name"]), safe(row["name"]) + f", pipeline rank {row['pp_rank']}" * several, row["before"],
                    row["after"], was)
            for row in ops[:_MOST]
        ],
        "left_out": f"{show_whole(rest)} further ops changed less." if rest > 0 else "", "wrong": "",
    }  # fmt: skip


def not_compared(names: tuple[str, str], wrong: str) -> ProfileComparison:
    """The other one cannot be read."""
    return {"a": names[0], "b": names[1], "verdict": "", "slower": False, "about": [], "parts": [], "ops": [],
            "left_out": "", "wrong": wrong}  # fmt: skip


def _verdict(a: ProfileFile, b: ProfileFile) -> str:
    was, now = a["step"]["measured"], b["step"]["measured"]
    if was <= 0:
        return f"B's step takes {time_text(now)}."
    noise = "; the ranges of their steps overlap, so it may be noise" if may_be_noise(a, b) else ""
    return f"B's step {show_pace(now / was, verb=True)}: {time_text(was)}, then {time_text(now)}{noise}."


def _about(a: ProfileFile, b: ProfileFile) -> Iterator[str]:
    """What else differs, so that nobody compares unlike runs unawares."""
    for label, one, other in (
        ("model", a["run"]["model"], b["run"]["model"]), ("layout", a["run"]["text"], b["run"]["text"]),
        ("ranks", a["run"]["world"], b["run"]["world"]), ("precision", a["run"]["precision"], b["run"]["precision"]),
        ("tokens of a step", a["run"]["tokens"], b["run"]["tokens"]),
        ("device", a["made"].get("device", "?"), b["made"].get("device", "?")),
    ):  # fmt: skip
        if one != other:
            yield f"{label}: {safe(one)} in A, {safe(other)} in B"


def _change(name: str, label: str, before: int, after: int, whole: int) -> ProfileChange:
    return {"name": name, "label": label, "a": time_text(before), "b": time_text(after),
            "change": time_text(after - before, "+"), "size": after - before,
            "share": part_of(after - before, whole)}  # fmt: skip

"""What readers of profiles ask of them: what parts are called, and which parts and ops make the difference of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypedDict

from penteract.measure.schemas.profile import ProfileFile

LABELS: Mapping[str, str] = {
    "compute": "products", "attention": "attention", "pointwise": "memory-bound", "tensor": "tensor",
    "context": "context", "expert": "expert", "data": "data", "pipeline": "pipeline", "update": "optimizer",
    "host": "host copies", "launch": "gaps", "unmatched": "unmatched",
}  # fmt: skip


class OpChange(TypedDict):
    """An op of two profiles: picoseconds of the step in each, on the slowest rank of its pipeline rank."""

    pp_rank: int
    name: str
    before: int
    after: int


def changes(before: ProfileFile, after: ProfileFile) -> list[OpChange]:
    """All ops of both, those that changed most first."""
    one, other = _by_name(before), _by_name(after)
    rows: list[OpChange] = [
        {"pp_rank": pp_rank, "name": name, "before": one[pp_rank, name], "after": other[pp_rank, name]}
        for pp_rank, name in dict.fromkeys([*one, *other])
    ]
    return sorted(rows, key=lambda row: -abs(row["after"] - row["before"]))


def part_changes(before: ProfileFile, after: ProfileFile) -> Mapping[str, tuple[int, int]]:
    """The parts of the rank with the most work, in each profile."""
    one, other = (max(p["ranks"], key=lambda row: row["work"])["parts"] for p in (before, after))
    return {name: (one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def may_be_noise(before: ProfileFile, after: ProfileFile) -> bool:
    """Whether the ranges of both profiles' bare steps overlap."""
    a, b = before["step"]["bare"], after["step"]["bare"]
    return min(a) <= max(b) and min(b) <= max(a)


def _by_name(profile: ProfileFile) -> Counter[tuple[int, str]]:
    return Counter({(row["pp_rank"], row["name"]): row["measured"] for row in profile["ops"]})

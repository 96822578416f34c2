"""The ranks of a profile beside each other: who works most, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from penteract.explore.answers.profiles.profile_lanes import kind_of
from penteract.explore.answers.profiles.shown_times import safe, time_text, timed
from penteract.explore.schemas.profile_schema import ProfiledRank, SkewPart
from penteract.measure.schemas.profile import RankRow
from penteract.measure.schemas.profile_parts import LABELS


def rank_skew(ranks: Sequence[RankRow], shown: int) -> list[ProfiledRank]:
    """Each rank's step; its work is compared with the median of its pipeline rank's GPUs."""
    most = max(row["work"] for row in ranks)
    found = list[ProfiledRank]()
    for row in ranks:
        typical = median_low(other["work"] for other in ranks if other["pp_rank"] == row["pp_rank"])
        found.append({
            "rank": row["rank"], "pp_rank": row["pp_rank"], "step": timed(row["step"]), "work": timed(row["work"]),
            "waits": timed(row["waits"]), "more": time_text(row["work"] - typical, "+"), "parts": _parts(row),
            "slowest": row["work"] == most, "shown": row["rank"] == shown,
        })  # fmt: skip
    return found


def skew_text(ranks: Sequence[RankRow]) -> str:
    """How far the work of ranks is apart, in a sentence."""
    if len(ranks) == 1:
        return "There is one rank."
    least, most = (how(ranks, key=lambda row: row["work"]) for how in (min, max))
    works, other = time_text(most["work"]), time_text(least["work"])
    return (f"Rank {most['rank']} works longest, {works} of its step; rank {least['rank']} works {other}. What is not "
            "work is waiting: for collectives, or for another pipeline rank.")  # fmt: skip


def _parts(row: RankRow) -> list[SkewPart]:
    """Parts in the order of their kinds, so that a rank's work comes first."""
    parts = sorted(row["parts"].items(), key=lambda item: (kind_of(item[0]), item[0]))
    return [
        {"name": safe(name), "label": LABELS.get(name, safe(name)), "kind": kind_of(name), "took": timed(size)}
        for name, size in parts
    ]

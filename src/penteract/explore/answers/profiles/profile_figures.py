"""One profile as the page shows it: the headline, the waterfall, and what would gain most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penteract.explore.answers.profiles.op_table import op_table, ops_about, unmatched_text
from penteract.explore.answers.profiles.profile_lanes import profile_lanes
from penteract.explore.answers.profiles.profile_memory import profile_memory
from penteract.explore.answers.profiles.rank_skew import rank_skew, skew_text
from penteract.explore.answers.profiles.shown_times import part_of, safe, time_text
from penteract.explore.schemas.page_values import Fact, WaterfallStep
from penteract.explore.schemas.profile_schema import ProfileAdvice, ProfileFigures
from penteract.measure.schemas.profile import ProfileFile, RankRow, WaterfallRow
from penteract.units import show_bytes, show_count, show_whole

_ROOM = 1.02  # of the waterfall's axis beyond its longest row
_CLOSE = 0.05  # of the predicted step: a prediction that is as near is good


def profile_figures(profile: ProfileFile, name: str, wanted: int | None) -> ProfileFigures:
    """The figures of a profile. `wanted`: a rank; None: the slowest of the pipeline rank that ends last."""
    ranks, step = profile["ranks"], profile["step"]
    rank = next((row for row in ranks if row["rank"] == wanted), None) or _first(profile)
    measured = step["measured"]
    return {
        "name": name, "headline": _headline(profile), "number": time_text(measured), "verdict": _verdict(profile),
        "good": abs(measured - step["predicted"]) <= _CLOSE * step["predicted"], "facts": list(_facts(profile)),
        "notes": list(_notes(profile["waterfall"])), "waterfall": _waterfall(profile["waterfall"], measured),
        "most": _most(profile["waterfall"]), "advice": _advice(profile),
        "rank": rank["rank"], "pp_rank": rank["pp_rank"],
        "ops": op_table(profile, rank["pp_rank"]), "ops_about": ops_about(profile, rank["pp_rank"]),
        "unmatched": unmatched_text(profile), "lanes": profile_lanes(profile, rank["rank"]),
        "ranks": rank_skew(ranks, rank["rank"]), "ranks_about": skew_text(ranks),
        "memory": profile_memory(profile, rank["rank"]),
    }  # fmt: skip


def _first(profile: ProfileFile) -> RankRow:
    """Of the ranks that the ops are about, that with the most work: others wait for it."""
    about = {row["rank"] for row in profile["ops"]}
    some = [row for row in profile["ranks"] if row["rank"] in about] or profile["ranks"]
    return max(some, key=lambda row: (row["work"], -row["rank"]))


def _headline(profile: ProfileFile) -> str:
    run, made = profile["run"], profile["made"]
    tokens = f"{show_whole(run['tokens'])} tokens a step in sequences of {show_whole(run['sequence_length'])}"
    about = (run["model"], f"{show_count(run['parameters'])} parameters", run["text"],
             f"{run['world']} rank{'s' * (run['world'] != 1)}", tokens, run["precision"],
             *(made.get(key, "") for key in ("device", "host", "date", "torch")))  # fmt: skip
    return " · ".join(safe(text) for text in about if text)


def _verdict(profile: ProfileFile) -> str:
    """The measured step beside the predicted one, and where the most of the difference is."""
    step = profile["step"]
    measured, predicted = step["measured"], step["predicted"]
    if predicted <= 0:
        return "Nothing was predicted."
    far = measured / predicted - 1
    begin = f"{part_of(abs(far))} {'longer' if far > 0 else 'shorter'} than predicted" if far < 2 else (
        f"{measured / predicted:.1f} times as long as predicted")  # fmt: skip
    rows = profile["waterfall"]
    at = next((i for i, row in enumerate(rows) if row["name"] == "predicted"), len(rows))
    beyond = [row for row in rows[at + 1 :] if not row["level"] and row["picoseconds"] > 0]
    if far <= 0 or not beyond:
        return f"{begin} ({time_text(predicted)})"
    most = max(beyond, key=lambda row: row["picoseconds"])
    return f"{begin} ({time_text(predicted)}); the most of it: {safe(most['label']).lower()}"


def _facts(profile: ProfileFile) -> Iterator[Fact]:
    step, memory = profile["step"], max(profile["memory"], key=lambda row: row["peak"])
    spread = f"{time_text(min(step['bare']))} to {time_text(max(step['bare']))}"
    yield {"label": "Predicted step", "text": time_text(step["predicted"]), "source": safe(profile["basis"]["about"])}
    yield {"label": "Ideal step", "text": time_text(step["ideal"]), "source": "its products at the device's peak"}
    yield {"label": "Steady steps", "text": spread, "source": f"measured: {len(step['bare'])} steps, no profiler"}
    yield {
        "label": "Profiler's cost",
        "text": f"× {step['slowdown']:.2f}",
        "source": "measured: steps under it over bare ones",
    }
    yield {
        "label": "Peak of tensors",
        "text": show_bytes(memory["peak"]),
        "source": f"measured on rank {memory['rank']}",
    }


def _notes(rows: Sequence[WaterfallRow]) -> Iterator[str]:
    """A file whose rows do not add up was not written by us."""
    at = 0
    for i, row in enumerate(rows):
        if row["level"] and i and row["picoseconds"] != at:
            yield f"The rows of this file do not add up to “{safe(row['label'])}”."
        at = row["picoseconds"] if row["level"] else at + row["picoseconds"]


def _waterfall(rows: Sequence[WaterfallRow], measured: int) -> list[WaterfallStep]:
    return [
        {"name": safe(row["name"]), "label": safe(row["label"]), "about": safe(row["about"]), "level": row["level"],
         "picoseconds": row["picoseconds"], "text": time_text(row["picoseconds"], "" if row["level"] else "+"),
         "share": part_of(row["picoseconds"], measured)}
        for row in rows
    ]  # fmt: skip


def _most(rows: Sequence[WaterfallRow]) -> int:
    """How far the longest row reaches."""
    at = most = 0
    for row in rows:
        at = row["picoseconds"] if row["level"] else at + row["picoseconds"]
        most = max(most, at)
    return max(1, round(_ROOM * most))


def _advice(profile: ProfileFile) -> list[ProfileAdvice]:
    measured = profile["step"]["measured"]
    return [
        {"what": safe(one["what"]), "gain": time_text(one["gain"]), "share": part_of(one["gain"], measured),
         "price": f"price: {safe(one['price'])}" if one["kind"] == "layout" else safe(one["price"])}
        for one in profile["advice"]
    ]  # fmt: skip

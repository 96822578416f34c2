"""The Profile view's answers: what a profile says, however large, damaged or hostile it is."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from explore.drawn_profiles import BEFORE, TWO_RANKS, drawn, made, written
from explore.drawn_questions import question
from penteract.cli.explore import explore
from penteract.errors import BadInput
from penteract.explore.answering import answer
from penteract.explore.answers.profiles.profile_lanes import KINDS, kind_of
from penteract.explore.answers.profiles.shown_times import time_text
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.training_runs.read_profiles import ProfileFolders
from penteract.measure.schemas.profile_parts import changes

Json = dict[str, Any]
HOSTILE = "<img src=x onerror=alert(1)>"
OPENING: Any = question()


def ask(folder: Path | None = None, files: list[Json] | None = None, **profile: Any) -> Json:
    request = {"version": VERSION, "kind": "profile", "profile": profile, **({"files": files} if files else {})}
    given = ProfileFolders((folder,)) if folder else None
    [row] = answer(request, OPENING, profiles=given)
    json.dumps(row, allow_nan=False)
    return row  # type: ignore[return-value]


def opened(name: str, text: str) -> Json:
    """A file as the page sends it."""
    packed = zlib.compressobj(wbits=-15)
    data = packed.compress(text.encode()) + packed.flush()
    return {"name": name, "data": base64.urlsafe_b64encode(data).decode().rstrip("=")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = tmp_path_factory.mktemp("given") / "profiles"
    written(given / "first", made())
    written(given / "run" / HOSTILE, made(BEFORE))
    for at, when in ((given / "first", 2e9), (given / "run" / HOSTILE, 1e9)):
        os.utime(at / "profile.json", (when, when))
    return given


def test_the_newest_is_shown_and_its_rows_add_up_to_the_step(folder: Path) -> None:
    found, file = ask(folder), made()
    assert [(one["name"], one["side"]) for one in found["profiles"]] == [("first", "A"), (f"run/{HOSTILE}", "")]
    figures = found["figures"]
    assert found["served"] and found["folder"] == "profiles" and not found["why"]
    assert figures["number"] == time_text(file["step"]["measured"])
    rows = figures["waterfall"]
    changed = sum(row["picoseconds"] for row in rows if not row["level"])
    assert rows[0]["picoseconds"] + changed == file["step"]["measured"] and figures["notes"] == []
    assert figures["most"] >= max(row["picoseconds"] for row in rows if row["level"])
    assert [row["text"] for row in rows if row["level"]] == [
        time_text(file["step"][name]) for name in ("ideal", "predicted", "measured")
    ]
    assert [one["gain"] for one in figures["advice"]] == [time_text(one["gain"]) for one in file["advice"]]
    assert figures["facts"][0]["text"] == time_text(file["step"]["predicted"])


def test_ops_are_in_the_order_of_the_file_with_their_kernels(folder: Path) -> None:
    figures, file = ask(folder)["figures"], made()
    assert [op["name"] for op in figures["ops"]] == [row["name"] for row in file["ops"]]
    for op, row in zip(figures["ops"], file["ops"], strict=True):
        assert op["measured"] == {"picoseconds": row["measured"], "text": time_text(row["measured"])}
        assert [kernel["name"] for kernel in op["kernels"]] == [kernel["name"] for kernel in row["kernels"]]
        assert bool(op["note"]) == (row["matched"] != "both") and bool(op["reached"]) == bool(row["reached"])
        assert op["part"] and KINDS[op["kind"]] is KINDS[kind_of(row["part"])]
    assert any(op["skew"] for op in figures["ops"]) and any(op["reached"] for op in figures["ops"])


def test_lanes_are_the_timeline_and_no_time_is_lost(folder: Path) -> None:
    file = made()
    for rank in (0, 1):
        figures = ask(folder, rank=rank)["figures"]
        planned, measured = figures["lanes"]["lanes"]
        timeline = file["timeline"]
        assert (planned["end"], measured["end"]) == tuple(
            lane["picoseconds"] for lane in (timeline["predicted"][0], timeline["measured"][rank])
        )
        assert (planned["gpus"], measured["gpus"], figures["rank"]) == ("pipeline rank 0", f"rank {rank}", rank)
        for lane in (planned, measured):
            blocks = lane["blocks"]
            assert blocks[0]["start"] == 0 and blocks[-1]["end"] == lane["end"]
            assert all(a["end"] == b["start"] for a, b in pairwise(blocks))
            own = sum(t["picoseconds"] for t, kind in zip(lane["times"], KINDS, strict=True) if not kind.other_stream)
            assert own == lane["end"]
            starts = [span["start"] for span in lane["other_streams"]]
            assert starts and starts == sorted(starts)
        ops = {op["number"]: op["name"] for op in figures["ops"]}
        named = [block for block in measured["blocks"] if block["op"] >= 0]
        assert named and all(block["text"].startswith(ops[block["op"]]) for block in named)
        assert [one["shown"] for one in figures["ranks"]] == [rank == 0, rank == 1]


def test_memory_by_owner_is_beside_the_plan_and_both_add_up(folder: Path) -> None:
    memory, file = ask(folder, rank=1)["figures"]["memory"], made()["memory"][1]
    assert memory["rank"] == 1 and memory["planned"]
    assert sum(one["measured"]["bytes"] for one in memory["owners"]) == file["peak"] == memory["total"]["bytes"]
    assert sum(one["predicted"]["bytes"] for one in memory["owners"]) == file["predicted"]
    assert all(one["measured"]["bytes"] <= memory["axis"]["most"] for one in memory["owners"])


def test_a_profile_of_before_is_shown_without_lanes(folder: Path) -> None:
    found = ask(folder, name=f"run/{HOSTILE}")["figures"]
    assert found["name"] == f"run/{HOSTILE}" and "no timeline" in found["lanes"]["missing"]
    assert found["lanes"]["lanes"] == [] and not found["memory"]["planned"] and len(found["ranks"]) == 4
    other = ask(folder, name=f"run/{HOSTILE}", rank=3)["figures"]
    assert (other["pp_rank"] == 1 and other["ops"] and other["ops"] != found["ops"]) or found["pp_rank"] == 1


def test_two_profiles_are_compared_by_what_changed_most(folder: Path) -> None:
    other = made()
    slow = max(range(len(other["ops"])), key=lambda i: other["ops"][i]["measured"])
    other["ops"][slow]["measured"] += 10**12
    other["step"] |= {"measured": 10**12 + other["step"]["measured"], "bare": [10**13]}
    other["run"]["precision"] = HOSTILE
    files = [opened("slower.json", json.dumps(other))]
    found = ask(folder, files, name="first", against="slower.json")
    compared = found["comparison"]
    assert [(one["name"], one["side"]) for one in found["profiles"]][:2] == [("slower.json", "B"), ("first", "A")]
    assert compared["slower"] and "times as long" in compared["verdict"] and "noise" not in compared["verdict"]
    assert compared["about"] == [f"precision: fp32 in A, {HOSTILE} in B"]
    first = changes(made(), other)[0]  # type: ignore[arg-type]
    assert compared["ops"][0] == {
        "name": first["name"], "label": first["name"], "a": time_text(first["before"]), "b": time_text(first["after"]),
        "change": "+1.00 s", "size": 10**12, "share": compared["ops"][0]["share"],
    }  # fmt: skip
    assert found["command"] == "penteract profile profiles/first slower.json"
    assert "no profile 'gone'" in ask(folder, name="first", against="gone")["comparison"]["wrong"]
    assert ask(folder, name="first", against="first")["comparison"] is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "another version"), ('{"version": 1}', "kind: missing"),
        (json.dumps({**made(), "ranks": []}), "ranks: empty"),
        (json.dumps({**made(), "waterfall": "x"}), "is no list"),
        (TWO_RANKS.read_text().replace('"calls": 1', '"calls": ' + "9" * 5000, 1), "too large"),
        (TWO_RANKS.read_text().replace('"reached": 0.0', '"reached": 1e999', 1), "no number"),
        (TWO_RANKS.read_text().replace('"reached": 0.0', '"reached": NaN', 1), "no number"),
        (json.dumps({**made(), "timeline": {"names": [], "predicted": [], "measured": made()["timeline"]["measured"]}}),
         "a name that it does not have"),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_profile_says_why_and_costs_itself_alone(text: str, why: str, tmp_path: Path) -> None:
    written(tmp_path / "bad", text)
    written(tmp_path / "good", made())
    found = ask(tmp_path, name="bad")
    assert why in found["why"] and found["why"].startswith("bad cannot be shown") and found["figures"] is None
    assert ask(tmp_path, name="good")["figures"]
    assert why in ask(tmp_path, name="good", against="bad")["comparison"]["wrong"]
    assert why in ask(None, [opened("bad.json", text)])["why"]


def test_a_file_whose_rows_do_not_add_up_is_noted(tmp_path: Path) -> None:
    wrong = made()
    wrong["waterfall"][1]["picoseconds"] += 1
    written(tmp_path / "wrong", wrong)
    assert ask(tmp_path)["figures"]["notes"] == ["The rows of this file do not add up to “Predicted”."]


def test_opened_files_come_damaged_or_too_large() -> None:
    assert "damaged" in ask(None, [{"name": "x", "data": "!!"}])["why"]
    bomb = opened("bomb", "0" * (2**26 + 1))
    assert "too large" in ask(None, [bomb])["why"] and len(bomb["data"]) < 10**6
    [row] = answer({"version": VERSION, "kind": "profile", "files": [{"name": 1}]}, OPENING)
    assert row["kind"] == "error" and "no opened file" in row["text"]


def test_only_folders_that_were_given_are_read(tmp_path: Path, folder: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "link").symlink_to(folder / "first")
    (given / "linked").mkdir()
    (given / "linked" / "profile.json").symlink_to(folder / "first" / "profile.json")
    written(given / "a" / "b" / "c" / "too_deep", made())
    os.mkfifo(given / "a" / "profile.json")
    found = ask(given)
    assert found["profiles"] == [] and "no profile in this folder" in found["why"]
    assert found["command"] == "penteract profile latest"
    for name in ("../given/first", str(folder / "first"), "link", "first"):
        assert ask(given, name=name)["figures"] is None
    assert "cannot be read" in ask(tmp_path / "gone")["why"]
    nothing = ask()
    assert not nothing["served"] and nothing["why"] == "No folder of profiles was given."


def test_a_profile_may_be_given_itself_and_changes_are_seen(tmp_path: Path) -> None:
    at = written(tmp_path / "one", made())
    folders = ProfileFolders((at,))
    assert list(folders.written()) == ["one"] and folders.read("one")["run"]["model"] == "tiny"
    other = made()
    other["run"]["model"] = "changed"
    (at / "profile.json").write_text(json.dumps(other))
    assert folders.read("one")["run"]["model"] == "changed"
    two = ProfileFolders((at, written(tmp_path / "else" / "one", made())))
    assert len(two.written()) == 2 and two.name == "one"


def test_a_large_profile_is_answered_in_time() -> None:
    """64 ranks of 3 000 spans each: what is sent is one rank."""
    text = json.dumps(drawn(1))
    began = time.process_time()
    found = ask(None, [opened("large.json", text)], rank=63)
    assert time.process_time() - began < 8
    figures = found["figures"]
    assert figures["rank"] == 63 and figures["pp_rank"] == 1 and len(figures["ops"]) == 300
    assert len(figures["lanes"]["lanes"][1]["blocks"]) <= 6000 and len(json.dumps(found)) < 4 * 2**20


def test_what_cannot_be_given_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        explore(profiles=tmp_path / "none")
    with pytest.raises(BadInput, match="no profile in it"):
        explore(profiles=tmp_path, export=tmp_path / "site")
    written(tmp_path / "bad", "{")
    with pytest.raises(BadInput, match="a profile cannot be read"):
        explore(profiles=tmp_path, export=tmp_path / "site")
    assert not (tmp_path / "site").exists()

"""The answers of the Bench view: what folders and files say, however damaged or hostile; by the formulas of bench."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import pytest

from explore.drawn_questions import question
from explore.drawn_sweep import HOSTILE, drawn_csv, drawn_folder, drawn_sweep
from measured_sweeps import case, row, sweep, written
from penteract.cli.app import main
from penteract.cli.explore import explore
from penteract.errors import BadInput
from penteract.explore.answering import answer
from penteract.explore.measured_sweeps.bench_answer import bench_answer
from penteract.explore.measured_sweeps.case_points import front_of
from penteract.explore.measured_sweeps.read_sweeps import SweepFolders
from penteract.measure.results.csv_rows import to_csv
from penteract.measure.results.heat_map import heat_map
from penteract.measure.results.ranking import numbers_of, rank, verdict
from penteract.measure.schemas.sweep_folder import SweepFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_folder(tmp_path_factory.mktemp("given") / "sweeps")


def plain(found: object) -> dict[str, Any]:
    """An answer as the page gets it."""
    return json.loads(json.dumps(found, allow_nan=False))


def asked(folder: Path, **options: Any) -> dict[str, Any]:
    return plain(bench_answer(SweepFolders(folder), {"sweep": "eight ranks", **options}))


def of_file(text: str, name: str = "runs.csv", **options: Any) -> dict[str, Any]:
    return plain(bench_answer(None, {"file": {"name": name, "text": text}, **options}))


def test_the_ranking_is_that_of_bench_show(folder: Path) -> None:
    found, rows = asked(folder), rank(numbers_of(drawn_sweep()))
    assert [(r["name"], r["place"], r["planned"]) for r in found["ranking"]["rows"]] == [
        (r.case.name, str(r.place), str(r.planned)) for r in rows
    ]
    assert [r["time_error"].replace("−", "-") for r in found["ranking"]["rows"]] == [
        f"{r.time_error:+.1%}" for r in rows
    ]
    said = verdict(rows)
    assert said is not None and said.regret is not None and said.best_in_first is found["good"]
    assert any(f"a regret of {said.regret:.1%}" in line for line in found["ranking"]["about"]) or not said.regret
    assert found["number"] == f"{rows[0].case.rate:.0f}" and rows[0].case.name in found["verdict"]


def test_cells_are_those_of_bench_show(folder: Path) -> None:
    heat, maps = asked(folder)["heat"], heat_map(drawn_sweep())
    assert (heat["rows"], heat["columns"], heat["panels"]) == ("dp", "tp", "pp")
    cells = {
        tuple(int(heat[f"{of}_texts"][cell[of]]) for of in ("panel", "row", "column")): cell for cell in heat["cells"]
    }  # fmt: skip
    assert cells.keys() == maps.cells.keys()
    for mesh, cell in maps.cells.items():
        assert (cells[mesh]["name"], cells[mesh]["count"]) == (cell.row.case.name, 1 + cell.others)
        assert cells[mesh]["text"] == cell.word or cell.values
    best = heat["cells"][heat["best"]]
    assert best["fill"] == "#fde725" and best["ink"] == "dark"
    memory = asked(folder, colour="allocated_bytes", rows="zero", columns="pp", panels="none")["heat"]
    assert (memory["rows"], memory["columns"], memory["panel_texts"]) != ("ZeRO", "pp", [""])  # zero does not vary
    assert memory["colour"] == "Memory allocated"


def test_every_state_is_counted_and_told(folder: Path) -> None:
    found = asked(folder)
    assert {one["state"] for one in found["states"]} == {
        "done", "void", "failed", "out of memory", "timed out", "lost", "skipped", "pending", "running",
    }  # fmt: skip
    assert sum(int(one["count"]) for one in found["states"]) == len(drawn_sweep().rows)
    assert sum(one["share"] for one in found["states"]) == pytest.approx(1)
    assert {one["state"]: one["why"] for one in found["unfinished"]}["failed"] == "it broke"


def test_the_residuals_tell_where_the_plan_errs(folder: Path) -> None:
    found = asked(folder)["residuals"]
    assert (found["group"], found["predicted"], found["measured"]) == ("tp", "predicted_step_s", "step_s")
    means = [float(one["mean"].strip("+%")) for one in found["groups"]]
    assert [one["text"] for one in found["groups"]] == ["1", "2", "4"] and means == sorted(means) and means[0] > 4
    assert "tp explains" in found["about"][1]
    memory = asked(folder, predicted="predicted_allocated_bytes", measured="allocated_bytes")["residuals"]
    assert memory["groups"][0]["mean"] == f"{1 / 11:+.2%}"


def test_a_csv_of_ours_says_what_the_folder_says(folder: Path) -> None:
    """So does the JSON that `bench show` prints."""
    from_folder, sweep_ = asked(folder), drawn_sweep()
    for found in (of_file(to_csv(sweep_)), of_file(json.dumps(asdict(sweep_)), "show.json")):
        for part in ("heat", "points", "ranking", "residuals", "states", "table", "number", "verdict"):
            assert found[part] == from_folder[part], part


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_of_others_is_understood(mark: str) -> None:
    found = of_file(drawn_csv(mark=mark))
    sources = {field["name"]: field["source"] for field in found["fields"]}
    assert sources["tp"] == "setting" and sources["tokens_per_s_per_gpu"] == "published" == sources["gpu_memory_GB"]
    assert [(one["state"], one["count"]) for one in found["states"]] == [("done", "48"), ("out of memory", "12")]
    assert (found["options"]["up"], found["options"]["across"]) == ("tokens_per_s_per_gpu", "gpu_memory_GB")
    assert {cell["text"] for cell in found["heat"]["cells"] if not cell["fill"]} <= {"OOM"}
    assert found["residuals"] is None and "No speed was predicted" in found["ranking"]["about"][0]
    assert found["options"]["file"] == {"name": "runs.csv"}  # its text does not travel back


def test_filters_hold_for_all_figures() -> None:
    every, some = of_file(drawn_csv()), of_file(drawn_csv(), only={"model_label": ["8B"], "tp": ["1", "2"]})
    assert every["table"]["total"] == 60 and some["table"]["total"] < 30
    at = some["table"]["fields"].index("tp")
    assert {row[at] for row in some["table"]["rows"]} == {"1", "2"}
    assert len(some["points"]["names"]) < len(every["points"]["names"]) and "tp" not in some["options"]["rows"]
    assert of_file(drawn_csv(), find="ERROR=al")["table"]["total"] == 1
    none = of_file(drawn_csv(), find="no such letters")
    assert none["table"]["total"] == 0 and none["heat"]["cells"] == [] and none["points"] is None


def test_the_table_is_sorted_and_its_file_has_plain_numbers() -> None:
    found = of_file(drawn_csv(), sort="gpu_memory_GB", descending=False, first=7)
    at = found["table"]["fields"].index("gpu_memory_GB")
    memory = [row[at] for row in found["table"]["rows"]]
    assert len(memory) == 7 and memory == sorted(memory, key=lambda text: float(text.split()[0]))
    whole = of_file(drawn_csv(), first=0)["table"]
    plain = [row[whole["fields"].index("tokens_per_s_per_gpu")] for row in whole["rows"]]
    given = [row["tokens_per_s_per_gpu"] for row in csv.DictReader(io.StringIO(drawn_csv()))]
    assert sorted(map(float, filter(None, plain))) == sorted(map(float, filter(None, given)))


def test_the_front_is_what_nothing_beats() -> None:
    draw = Random(3)
    for better in product(("most", "least"), repeat=2):
        xs, ys = ([draw.randrange(12) for _ in range(40)] for _ in range(2))
        good = [draw.random() > 0.2 for _ in xs]
        sx, sy = (1 if one == "most" else -1 for one in better)
        places = {(xs[i], ys[i]) for i in front_of(xs, ys, good, better)}
        beaten = {
            (x, y) for x, y, is_good in zip(xs, ys, good, strict=True) if is_good and not any(
                g and sx * a >= sx * x and sy * b >= sy * y and (a, b) != (x, y)
                for a, b, g in zip(xs, ys, good, strict=True))
        }  # fmt: skip
        assert places == beaten
    assert front_of([1.0], [1.0], [True], ("", "most")) == []


WRONG = [
    "",
    "one line",
    "a,b\n",
    "{",
    "[1, 2]",
    "[]",
    '{"settings": {}, "rows": []}',
    "a;b\n",
    "[" * 100_000,
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_table_is_an_error_in_a_line(text: str) -> None:
    request = {"version": 1, "kind": "bench", "bench": {"file": {"name": HOSTILE, "text": text}}}
    [found] = answer(request, question())
    assert (found["kind"], found["error"]["code"]) == ("error", "FILE")
    assert found["text"].count("\n") == 0


OPTIONS: list[dict[str, Any]] = [
    {"rows": 3}, {"only": {"tp": "1"}}, {"only": {"tp": []}}, {"file": "x"}, {"file": {"name": "a", "path": "/etc"}},
    {"first": -1}, {"first": True}, {"descending": 1}, {"colour": "x" * 500}, {"folder": "/etc"}, {"find": ["a"]},
]  # fmt: skip


def test_odd_letters_of_a_file_are_texts() -> None:
    found = of_file("a\0b,c\n1\0,2\n\u202e3,nan\n")
    assert found["table"]["total"] == 2
    assert not {"\0", "\u202e"} & {letter for cells in found["table"]["rows"] for cell in cells for letter in cell}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    [found] = answer({"version": 1, "kind": "bench", "bench": options}, question())
    assert found["kind"] == "error" and found["error"]["code"] == "QUESTION"


def test_fields_that_a_table_has_not_are_chosen_anew(folder: Path) -> None:
    found = asked(folder, rows="no such", colour="model", up=HOSTILE, sort="x", only={"x": ["1"]}, group="y")
    assert found["options"]["rows"] == "dp" and found["options"]["colour"] == "tokens_per_s_per_gpu"
    assert found["options"]["only"] == {} and found["residuals"]["group"] == "tp"


def test_nothing_outside_of_the_folder_is_read_and_damage_costs_itself_alone(tmp_path: Path) -> None:
    secret = written(sweep(row(case(9), [1.0] * 5)), tmp_path / "secret")
    given = tmp_path / "sweeps"
    at = written(drawn_sweep(), given / "here")
    (given / "linked").symlink_to(secret.path)
    (given / "names").mkdir()
    settings = json.loads((at.path / "sweep.json").read_text())
    (given / "names" / "sweep.json").write_text(json.dumps({**settings, "cases": ["../../../secret/cases/009"]}))
    names = [one.case.name for one in drawn_sweep().rows]
    for name, damage in zip(names[1:5], ("{", '{"schema": "penteract.sweep/9"}', "[" * 100_000, "\0"), strict=True):
        (at.case(name).path / "status.json").write_text(damage)
    (at.case(names[5]).path / "case.json").unlink()
    (at.case(names[6]).path / "status.json").unlink()
    (at.case(names[6]).path / "status.json").symlink_to(secret.case("009").path / "status.json")
    found = bench_answer(SweepFolders(given), {"sweep": "here"})
    assert {one["name"] for one in found["sweeps"]} == {"here", "names"}
    assert found["table"] is not None and found["table"]["total"] == len(names) - 6
    assert len(found["notes"]) == 5 and "not followed" not in "".join(found["notes"][:4])
    wrong = bench_answer(SweepFolders(given), {"sweep": "names"})
    assert wrong["table"] is None and "not the name of a case" in wrong["empty"]


def test_a_folder_may_be_a_sweep_be_empty_or_be_gone(folder: Path, tmp_path: Path) -> None:
    assert bench_answer(SweepFolders(folder / "older"), {})["table"]
    assert "no sweep" in bench_answer(SweepFolders(tmp_path), {})["empty"]
    assert "cannot be read" in bench_answer(SweepFolders(tmp_path / "gone"), {})["empty"]
    [static] = answer({"version": 1, "kind": "bench"}, question())
    assert not static["served"] and static["command"] == "penteract explore --sweeps sweeps"
    named = bench_answer(None, {"file": {"name": HOSTILE}})
    assert HOSTILE in named["empty"] and "has not its content" in named["empty"]
    with pytest.raises(BadInput, match="no such folder"):
        explore(sweeps=tmp_path / "none")


def test_a_case_that_changes_is_read_again(tmp_path: Path) -> None:
    at = written(drawn_sweep(), tmp_path / "s")
    sweeps = SweepFolders(tmp_path)
    before = bench_answer(sweeps, {})["states"]
    name = drawn_sweep().rows[17].case.name  # it runs
    at.case(name).write_status(row(case(1), state="failed").status)
    assert bench_answer(sweeps, {})["states"] != before


def test_a_hundred_thousand_cases_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Within seconds of a core, also where they are asked about again."""
    text = drawn_csv(100_000)
    began = time.process_time()
    found = of_file(text)
    assert len(found["points"]["x"]) == 80_000 and found["table"]["total"] == 100_000
    assert len(found["table"]["rows"]) == 100 and time.process_time() - began < 30


def test_an_export_has_what_is_read_of_the_sweeps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    assert (
        main(["explore", "tiny", "--gpus", "1xH200", "--export", str(tmp_path / "site"), "--sweeps", str(folder)]) == 0
    )
    with ZipFile(tmp_path / "site" / "penteract.zip") as archive:
        archive.extractall(tmp_path / "out")
    inside = SweepFolders(tmp_path / "out" / "sweeps")
    assert bench_answer(inside, {"sweep": "eight ranks"})["table"] == asked(folder)["table"]
    names = {path.name for path in (tmp_path / "out" / "sweeps").rglob("*") if path.is_file()}
    assert names == {"sweep.json", "case.json", "status.json", "result.json"}
    first = json.loads((tmp_path / "site" / "first.json").read_text())["bench"][0]
    assert not first["served"] and first["table"]
    capsys.readouterr()
    assert main(["explore", "tiny", "--export", str(tmp_path / "other"), "--sweeps", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error[FOLDER]: no sweep in it · --sweeps")
    assert SweepFolder(folder / "older").exists

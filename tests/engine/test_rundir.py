from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penteract.config.files.run_folder import command_entry, commands, typed
from penteract.engine.run_folder import checkpoint_folder, rundir
from penteract.errors import BadInput, BadNumerics, DiskFailure


def made(out: Path, name: str = "tiny") -> Path:
    folder = rundir.create(out, name, "penteract train --note 'two words'")
    (folder / "run.toml").write_text("")
    return folder


def test_a_new_run_is_the_latest_once_it_trains(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "runs"
    first, second = made(out), made(out)
    assert not (out / "latest").exists()
    for begun in (first, second):
        rundir.make_latest(begun, out)
    made(refused := tmp_path / "refused")
    assert not (refused / "latest").exists()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_tiny_[0-9a-f]{6}", first.name)
    assert first != second
    assert (out / "latest").resolve() == second.resolve()
    assert commands((second / "command.txt").read_text()) == ["penteract train --note 'two words'"]
    assert (second / "checkpoints").is_dir()
    assert json.loads((second / "status.json").read_text())["state"] == "created"
    assert sorted(p.name for p in out.iterdir()) == sorted([first.name, second.name, "latest"])


def test_commands_are_kept_with_when_and_from_which_step(tmp_path: Path) -> None:
    folder, odd = made(tmp_path), "penteract train --note 'a\n# b' --resume latest"
    for command, step in ((odd, 21), ("penteract train --into x", 41), ("", 61)):  # not known: not noted
        (folder / rundir.NEXT).write_text("")
        rundir.mark_resumed(folder, 2, command, step)
    text = (folder / "command.txt").read_text()
    assert commands(text) == ["penteract train --note 'two words'", odd, "penteract train --into x"]
    began = re.findall(r"^# (\S+), from step (\d+)$", text, re.MULTILINE)
    assert [int(step) for _, step in began] == [1, 21, 41]
    assert sorted(when for when, _ in began) == [when for when, _ in began]
    assert commands("penteract train\n") == ["penteract train"]  # as it was written before


def test_which_run_latest_was_is_kept_with_the_command(tmp_path: Path) -> None:
    words = ["penteract", "train", "--init", "latest", "--compare=latest"]
    text = typed(words, init=tmp_path / "a", compare=tmp_path / "b", resume=tmp_path / "c")
    assert text.splitlines()[:2] == [f"# --init latest was {tmp_path}/a", f"# --compare latest was {tmp_path}/b"]
    assert commands(command_entry(text, 1, "now")) == ["penteract train --init latest --compare=latest"]
    assert typed(["penteract", "train", "--init", "a"], init=tmp_path / "a") == "penteract train --init a"


@pytest.mark.parametrize("name", ["../../etc", "/abs", "a/b", "", "..", "é x", "x" * 300, "-rf"])
def test_names_stay_below_the_folder(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path, name)
    assert folder.parent == tmp_path
    assert re.fullmatch(r"[A-Za-z0-9._-]+", folder.name)


def test_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: made(tmp_path), range(24)))
        list(pool.map(lambda folder: rundir.make_latest(folder, tmp_path), folders))
    assert len(set(folders)) == 24
    assert (tmp_path / "latest").is_dir()


def test_a_place_that_cannot_be_is_a_disk_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure):
        rundir.create(tmp_path / "file", "tiny")
    (tmp_path / "runs" / "latest" / "in the way").mkdir(parents=True)
    with pytest.raises(DiskFailure, match=r"the newest run · .*latest"):
        rundir.make_latest(made(tmp_path / "runs"), tmp_path / "runs")


def test_errors_are_rows_and_torn_ones_are_left_out(tmp_path: Path) -> None:
    assert rundir.errors(tmp_path) == []
    error = BadNumerics("NUMERICS", "the loss is not finite", where="step 3", found="nan", fix="a smaller rate")
    rundir.append_error(tmp_path, rundir.error_row(error, 1, ValueError("cause")))
    start = rundir.errors_size(tmp_path)
    with (tmp_path / "errors.jsonl").open("ab") as file:
        file.write(b'{"half": \n[]\n')
    rundir.append_error(tmp_path, rundir.error_row(error, 2, noticed_by=1))
    assert [row["rank"] for row in rundir.errors(tmp_path)] == [1, 2]
    assert "ValueError: cause" in rundir.errors(tmp_path)[0]["traceback"]
    (row,) = rundir.errors(tmp_path, start)
    assert (row["rank"], row["exit_code"]) == (2, 73)
    assert rundir.error_line(row) == str(error)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_has_saved_nothing_begins_anew_in_its_folder(tmp_path: Path, elsewhere: bool) -> None:
    out, mine = tmp_path / "runs", tmp_path / "runs" / "mine"
    checkpoints = str(tmp_path / "disk") if elsewhere else "inside"
    for _ in range(3):
        assert rundir.create(out, "tiny", "x", checkpoints, into=mine) == mine
        rundir.make_latest(mine, out)
        assert checkpoint_folder.find(mine, write=True).is_dir() and (out / "latest").resolve() == mine
        assert not elsewhere or checkpoint_folder.leads_to(mine, checkpoints)
    outside = rundir.create(out, "tiny", "x", into=tmp_path / "other")
    rundir.make_latest(outside, out)
    assert outside.is_dir() and (out / "latest").resolve() == mine  # it leads to runs beside it alone


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    rundir.refuse_foreign(tmp_path / "none")
    rundir.refuse_foreign(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BadInput, match="no run's"):
        rundir.refuse_foreign(tmp_path)
    with pytest.raises(BadInput, match="not a folder"):
        rundir.refuse_foreign(tmp_path / "thesis.tex")
    rundir.refuse_foreign(rundir.create(tmp_path / "runs", "tiny", "x"))

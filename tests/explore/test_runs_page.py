"""The Runs view: what folders say, however damaged or hostile; and in a real browser, live."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from explore.drawn_questions import question
from explore.opened import Opened, opened
from explore.served import Served
from penteract.cli.explore import explore
from penteract.engine.run_folder import rundir
from penteract.engine.session.outputs.metrics import MetricsWriter
from penteract.errors import BadInput, BadNumerics
from penteract.explore.answering import answer
from penteract.explore.training_runs.read_runs import RunFolders
from penteract.explore.training_runs.run_answer import runs_answer

HOSTILE = "<img src=x onerror=alert(1)>"


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step * 64, "train/loss": 8.0 / step, "train/grad_norm": 1.0, "train/lr": 1e-3,
            "perf/tokens_per_sec": 1000.0 + step, "perf/step_time_s": 0.5 + 0.01 * (step % 3),
            "perf/predicted_step_time_s": 0.4, "perf/mfu": 0.25, "mem/predicted_gib": 2.0,
            "mem/measured_gib": 2.5, **more}  # fmt: skip


def made(folder: Path, name: str, steps: int, state: str = "done", epoch: int = 1, **more: Any) -> Path:
    """A run folder, written by the engine's own writers."""
    run = folder / name
    run.mkdir(parents=True)
    (run / rundir.COMMAND).write_text("penteract train --preset tiny\n")
    with MetricsWriter(run / "metrics.jsonl", epoch=epoch) as metrics:
        for step in range(1, steps + 1):
            metrics.write(row(step, **more))
    rundir.write_status(run, state)
    return run


def test_the_command_is_that_of_the_run(tmp_path: Path) -> None:
    run = made(tmp_path / "runs", "one", 1)
    for written, shown in (
        ("/opt/bin/penteract train --init 'my model' --steps 3\n", "penteract train --init 'my model' --steps 3"),
        ("/opt/src/penteract/__main__.py train\n", "penteract train"), ("mine.py --fast\n", "mine.py --fast"),
        ("# …, from step 1\npenteract train\n# …, from step 3\npenteract train --resume latest\n", "penteract train"),
        ("an open 'quote", "penteract train --preset tiny"), ("", "penteract train --preset tiny"),
    ):  # fmt: skip
        (run / rundir.COMMAND).write_text(written)
        assert runs_answer(RunFolders(tmp_path / "runs"), [])["command"] == shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("given") / "runs"
    made(runs, "first", 20, **{"val/loss": 3.0})
    failed = made(runs, HOSTILE, 5, "failed")
    error = BadNumerics("LOSS", "the loss is not finite", where="step 6", found=HOSTILE, fix="a smaller learning rate")
    rundir.append_error(failed, rundir.error_row(error, 3))
    step = failed / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    (step / "proven").touch()
    (step / "rank-00000.safetensors").write_bytes(bytes(4096))
    (failed / "checkpoints" / "step-00000005").mkdir()
    os.utime(failed / "status.json", (2e9, 2e9))  # the newest
    return runs


def test_what_the_folders_say(folder: Path) -> None:
    found = runs_answer(RunFolders(folder), [HOSTILE, "first", "../first", 7])
    failed, first = found["runs"]
    assert [failed["name"], first["name"]] == [HOSTILE, "first"] and found["number"] == "2" and not found["good"]
    assert failed["state"] == "failed" and "the loss is not finite" in failed["errors"][0]["text"]
    assert failed["errors"][0]["text"] == rundir.error_line(rundir.errors(folder / HOSTILE)[0])
    assert [(c["step"], c["proven"]) for c in failed["checkpoints"]] == [("5", False), ("4", True)]
    assert (first["predicted"], first["measured"], first["difference"]) == (
        "2.00 GiB",
        "2.50 GiB",
        "+512.00 MiB (+25.0%)",
    )
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert [line["run"] for line in curves["train/loss"]["lines"]] == [HOSTILE, "first"]
    assert curves["train/loss"]["lines"][1]["texts"][-1] == "first, step 20: 0.4000 nats a token"
    assert curves["train/loss"]["lines"][1]["points"][:2] == [0.0, 1.0]
    assert [line["run"] for line in curves["val/loss"]["lines"]] == ["first"]
    [level] = [one for one in curves["perf/step_time_s"]["levels"] if one["run"] == "first"]
    assert (level["text"], level["at"]) == ("first, predicted: 0.400 seconds", 0.0)
    assert (first["predicted_step"], first["measured_step"], first["step_difference"]) == (
        "400 ms", "510 ms", "+110 ms (+27.5%)",
    )  # fmt: skip
    assert curves["train/loss"]["levels"] == [] and curves["perf/mfu"]["label"] == "MFU"
    shares = [share for curve in curves.values() for line in curve["lines"] for share in line["points"]]
    assert all(0 <= share <= 1 for share in shares)


def test_what_was_not_predicted_is_not_shown(tmp_path: Path) -> None:
    made(tmp_path, "cpu", 3, **{"perf/predicted_step_time_s": None})
    found = runs_answer(RunFolders(tmp_path), None)
    assert [curve["levels"] for curve in found["curves"]] == [[]] * len(found["curves"])
    assert (found["runs"][0]["predicted_step"], found["runs"][0]["step_difference"]) == ("", "")


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    run = made(tmp_path, "again", 6)
    with (run / "metrics.jsonl").open("a") as file:  # epoch 2 goes on from step 4
        file.writelines(json.dumps(row(step, epoch=2)) + "\n" for step in (4, 5))
    [line] = runs_answer(RunFolders(tmp_path), None)["curves"][0]["lines"]
    assert [text.split(": ")[0] for text in line["texts"]] == [f"again, step {n}" for n in (1, 2, 3, 4, 5)]


def test_nothing_outside_of_the_folder_is_read_and_rubbish_costs_itself_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    made(secret, "other", 3)
    runs = tmp_path / "runs"
    odd = made(runs, "odd", 3)
    (runs / "link").symlink_to(secret / "other")
    (odd / "checkpoints").symlink_to(secret)
    (odd / "command.txt").unlink()
    (odd / "command.txt").symlink_to(secret / "other" / "command.txt")
    os.mkfifo(odd / "errors.jsonl")
    (odd / "status.json").write_text("[" * 100_000)
    digits = "1" + "0" * 400
    values = ('4, "train/loss": "x"', digits, '5, "train/loss": 1e400', f'6, "train/loss": {digits}', "true")
    rubbish = [*(f'{{"step": {value}}}' for value in values), "[]", '{"step": 7, "mem/predicted_gib": {}']
    with (odd / "metrics.jsonl").open("a") as file:
        file.write("\n".join(rubbish))
    [found] = (answered := runs_answer(RunFolders(runs), None))["runs"]
    assert found["name"] == "odd" and found["command"] == "" and found["errors"] == [] and found["checkpoints"] == []
    assert "another disk" in found["note"] and found["state"] == "unknown"
    assert len(answered["curves"][0]["lines"][0]["texts"]) == 3
    json.dumps(answered, allow_nan=False)


def test_a_folder_may_be_a_run_be_empty_or_be_gone(folder: Path, tmp_path: Path) -> None:
    assert [run["name"] for run in runs_answer(RunFolders(folder / "first"), None)["runs"]] == ["first"]
    assert "no run" in runs_answer(RunFolders(tmp_path), None)["verdict"]
    assert "cannot be read" in runs_answer(RunFolders(tmp_path / "gone"), None)["verdict"]
    [static] = answer({"version": 1, "kind": "runs"}, question())
    assert not static["served"] and static["command"] == "penteract explore --runs runs"


def test_many_steps_are_a_few_points_and_the_newest_is_one(tmp_path: Path) -> None:
    made(tmp_path, "long", 5000)
    line = runs_answer(RunFolders(tmp_path), None)["curves"][0]["lines"][0]
    assert len(line["texts"]) == 240 and "step 5 000:" in line["texts"][-1]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        explore(runs=tmp_path / "none")


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    return "--runs", str(folder)


def show(page: Opened, **more: Any) -> dict[str, Any]:
    page.go(question(), None, "runs", **more)
    page.page.wait_for_selector("#runs .chip", timeout=30_000)
    [found] = page.served.ask("runs", question=question(), **more)
    page.until("document.querySelectorAll('#runs .chip[aria-pressed=true]').length === arg", len(more.get("runs", [0])))
    return found


def test_the_view_says_what_the_folders_say_and_hostile_names_are_text(shared: Opened) -> None:
    found = show(shared)
    assert shared.text(".big") == "2" and shared.text(".state") == found["verdict"]
    assert shared.page.query_selector("#page img[src=x]") is None and HOSTILE in shared.text("#runs")
    assert found["runs"][0]["errors"][0]["text"] in shared.text("#details")
    assert "step 4" in shared.text("#details") and "proven" in shared.text("#details")
    shared.page.click("#runs .chip >> text=first")
    shared.until("document.querySelectorAll('#curve-train-loss polyline').length === 2")
    shared.page.wait_for_timeout(100)
    assert shared.state()["runs"] == [HOSTILE, "first"] and shared.state()["view"] == "runs"
    assert len(shared.page.query_selector_all("#curve-perf-step_time_s .run-level")) == 2
    assert "first, predicted: 0.400 seconds" in shared.text("#curve-perf-step_time_s")
    assert found["runs"][1]["step_difference"] in shared.text("#details")
    shared.page.focus("#curve-train-loss svg.curve")
    shared.page.keyboard.press("ArrowDown")
    shared.page.keyboard.press("Home")
    assert shared.text("#curve-train-loss .reading") == "first, step 1: 8.0000 nats a token"


def test_curves_are_live(shared: Opened, folder: Path) -> None:
    show(shared, runs=["first"])
    with (folder / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(21, epoch=1)) + "\n")
    shared.until("document.querySelector('#curve-train-loss svg.curve').getAttribute('aria-valuemax') === '20'")
    shared.page.focus("#curve-train-loss svg.curve")
    shared.page.keyboard.press("End")
    shared.until("document.querySelector('#curve-train-loss .reading').textContent.includes('step 21:')")


@pytest.mark.parametrize(("width", "theme"), [(380, "dark"), (2560, "light")])
def test_every_width_and_axe(browser: Any, here: Served, axe: str, width: int, theme: str) -> None:
    with opened(browser, here, viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True) as page:
        show(page, runs=[HOSTILE, "first"])
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        page.page.click("#details .tools >> text=Table")
        assert page.serious(axe) == [] and page.said == []


def test_without_a_folder_the_view_names_its_command(browser: Any, plain: Served) -> None:
    with opened(browser, plain) as page:
        page.go(question(), None, "runs")
        page.page.wait_for_selector("#runs .command", timeout=30_000)
        assert page.text("#runs .command") == "penteract explore --runs runs" and page.said == []

"""`penteract plan --trace`: the step of a layout, of all pipeline ranks or of one; and no file where there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.plan.tiny_step import FEW, TINY_STEP, Tell
from penteract import plan, trace
from penteract.config.layout import Layout

PIPELINE = ["plan", *TINY_STEP, "--layout", "tp=2,pp=2"]


def test_a_trace_is_the_step_of_the_layout(tell: Tell, tmp_path: Path) -> None:
    told = tell(*PIPELINE, "--trace", "step.json")
    assert (told.code, told.err) == (0, "")
    said = "Trace: step.json has a step of all 2 pipeline ranks; open it in ui.perfetto.dev or chrome://tracing\n"
    assert said in told.out
    rows = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    named = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert named == ["pp rank 0 (rank 0)", "pp rank 1 (rank 2)"]
    took = max(
        row["ts"] + row["dur"] for row in rows if row.get("cat") not in ("communication", "launch") and row["ph"] == "X"
    )
    found = json.loads(tell(*PIPELINE, "--trace", "again.json", "--trace-pp-rank", 1, "--json").out)
    assert found["notes"][-1].startswith(
        "Trace: again.json has a step of pipeline rank 1 of 2; open it in ui.perfetto.dev"
    )
    assert took == pytest.approx(found["layouts"][0]["time"]["step_s"] * 1e6)
    alone = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    assert sorted(map(str, alone)) == sorted(str(row) for row in rows if row["pid"] == 2)


def test_a_trace_of_the_layout_that_why_names(tell: Tell, tmp_path: Path) -> None:
    assert tell("plan", *TINY_STEP, *FEW, "--why", 2, "--trace", "second.json", "--trace-pp-rank", 0).code == 0
    best = plan("tiny", "4xH200", sequence_length=256, batch="16seqs", fix="cp=1,pp=1/2,recompute=none")
    trace(best, tmp_path / "same.json", number=2, pp_rank=0)
    assert (tmp_path / "same.json").read_bytes() == (tmp_path / "second.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trace", "no/step.json"], "[FILE]: cannot be written · --trace · found no/step.json · fix: name a file in "
         "a folder that exists"),
        (["--trace", "."], "[FILE]: it is a folder · --trace · found . · fix: name a file in it: step.json"),
        (["--out", "."], "[FILE]: it is a folder · --out · found . · fix: name a file in it: run.toml"),
        (["--trace", "x.json", "--trace-pp-rank", "2"], "[VALUE]: no such pipeline rank of 2 · --trace-pp-rank · found "
         "2 / allowed 0 to 1 · fix: --trace-pp-rank 1"),
        (["--trace", "x.json", "--trace-pp-rank", "-1"], "[VALUE]: pipeline ranks count from 0 · --trace-pp-rank · "
         "found -1 / allowed a whole number, 0 to 2^20 · fix: --trace-pp-rank 0"),
        (["--trace-pp-rank", "0"], "[USAGE]: a pipeline rank without a trace · --trace-pp-rank · found no --trace "
         "· fix: --trace step.json"),
        (["--trace", "x.json", "--out", "x.json"], "[USAGE]: two files with the same name · --trace · found x.json · "
         "fix: another name"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_leaves_no_file(tell: Tell, tmp_path: Path, words: list[str], line: str) -> None:
    told = tell(*PIPELINE, *words)
    assert (told.code, told.out, told.err) == (2, "", f"error{line}\n")
    assert list(tmp_path.iterdir()) == []


def test_no_trace_of_what_does_not_fit(tell: Tell, tmp_path: Path) -> None:
    large = ["plan", "llama-3.1-8b", "--gpus", "1xA100-40GB", "--batch", "8seqs", "--trace", "x.json"]
    told = tell(*large, "--layout", "mbs=1", "--out", "x.toml")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(
        "error[MEMORY]: no trace of what does not fit · --trace · found 156.2 GiB a GPU / allowed"
    )
    told = tell(*large, "--fix", "mbs=1,recompute=full")
    assert (told.code, told.out) == (2, "") and told.err.startswith("error[FIT]: no layout fits · 1xA100-40GB · found ")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_stopped_leaves_no_file_and_says_so(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(steps: object, layout: Layout, write: Callable[[str], object], pp_ranks: object) -> None:
        write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["penteract.planner.report.trace"], "write_trace", stop)
    told = tell(*PIPELINE, "--trace", "x.json")
    assert (told.code, told.err) == (130, "stopped: x.json was not written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_is_stopped_says_what_it_did_not_write(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*about: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["penteract.planner.plan"], "candidates", stop)
    monkeypatch.setattr(sys.modules["penteract.planner.plan"], "exact", stop)
    alone = tell(*PIPELINE, "--trace", "x.json")
    assert (alone.code, alone.out, alone.err) == (130, "", "stopped: x.json was not written\n")
    told = tell("plan", *TINY_STEP, *FEW, "--trace", "x.json", "--out", "x.toml")
    assert (told.code, told.err) == (130, "stopped: x.toml was not written\nstopped: x.json was not written\n")
    assert "INCOMPLETE" in told.out and list(tmp_path.iterdir()) == []


def test_a_trace_that_is_cut_short_leaves_no_file(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(steps: object, layout: Layout, write: Callable[[str], object], pp_ranks: object) -> None:
        write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["penteract.planner.report.trace"], "write_trace", full)
    told = tell(*PIPELINE, "--trace", "x.json")
    assert told.code not in (0, 2)
    assert told.err.startswith("error[DISK]: cannot be written: No space left on device · --trace x.json")
    assert list(tmp_path.iterdir()) == []

"""`penteract plan` as it is typed: text, JSON, run files, refusals, and how little it loads."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penteract import plan, trace
from penteract.config import catalog
from penteract.config.layout import Layout
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY
from penteract.config.resolve.resolved_run import resolve
from penteract.planner.ask import LAYOUT_SETTINGS, as_text, as_word, parse_settings
from penteract.planner.plan import exact
from penteract.planner.report.as_text import as_text_whole
from penteract.planner.report.explain import how_much_slower
from penteract.planner.report.what_if import Change, sentence
from penteract.units import show_step

Tell = Callable[..., Any]
TINY_STEP = ["tiny", "--gpus", "4xH200", "--seq", "256", "--batch", "16seqs"]
FEW = ["--fix", "cp=1,pp=1/2,recompute=none"]
MEMORY = {"parameters_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib", "allocated_gib"}


def test_json_is_as_promised(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, "--top", "3", "--json", "--tokens", "1B", "--usd-per-gpu-hour", "2")
    assert (told.code, told.err) == (0, "")
    found = json.loads(told.out)
    assert {"model", "cluster", "counts", "layouts", "schema_version", "basis"} <= found.keys()
    counts = found["counts"]
    assert counts["enumerated"] == counts["fit"] + sum(counts["refused"].values())
    assert len(found["layouts"]) == 3
    times = [layout["time"]["step_s"] for layout in found["layouts"]]
    assert times[0] == min(times)
    for layout in found["layouts"]:
        assert {"layout", "memory", "time", "tokens_per_s_per_gpu", "mfu", "mfu_causal", "limited_by"} <= layout.keys()
        assert layout["memory"].keys() >= MEMORY
        kinds = sum(layout["memory"][kind] for kind in MEMORY - {"allocated_gib"})
        assert kinds == pytest.approx(layout["memory"]["allocated_gib"])
        parts = {k: v for k, v in layout["time"].items() if k not in ("step_s", "at_least_s")}
        assert sum(parts.values()) == pytest.approx(layout["time"]["step_s"])
        settings = layout["layout"]
        assert settings["dp"] * settings["tp"] * settings["pp"] * settings["cp"] == 4
    rate = found["layouts"][0]["tokens_per_s_per_gpu"]
    assert found["budget"]["usd"] == pytest.approx(2 * 1e9 / rate / 3600)


def test_text_tells_the_answer(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, "--top", "3", "--why", "1", "--draw", "--tokens", "1B")
    assert (told.code, told.err) == (0, "")
    lines = told.out.splitlines()
    assert lines[0].startswith("tiny · ")
    for word in (
        "Memory of dp=",
        "Fit: ",
        "Reach the batch: ",
        "The fastest with other degrees (dp, tp, pp, cp, ep): ",
        " overtake #1 with ",
        "rank 0",
        "GPU-hours",
    ):
        assert word in told.out, word
    assert len([line for line in lines if line.lstrip().startswith(("1  dp=", "2  dp=", "3  dp="))]) == 3


def test_the_answer_comes_before_what_the_search_did(tell: Tell) -> None:
    told = tell("plan", "llama-3.1-8b", "--gpus", "8xH200", "--fix", "tp=2").out
    order = ["llama-3.1-8b · ", "A GPU offers ", "#  layout", "Not tried", "Memory of ", "Fit: ", "layouts in ",
             "Left out:", "Rates measured", "Next: "]  # fmt: skip
    assert [told.index(word) for word in order] == sorted(told.index(word) for word in order)
    nothing = tell("plan", "llama-3.1-405b", "--gpus", "1xH200").out  # its reasons are the answer
    assert 0 < nothing.index("layouts in ") < nothing.index("Nothing fits")


@pytest.mark.parametrize(
    ("second", "words"),
    [(1.0004, "as fast{} to 0.1%"), (0.9996, "as fast{} to 0.1%"), (1.0006, "0.1% slower{}"), (1.2, "20.0% slower{}"),
     (0.97, "3.0% faster{}"), (2.99, "199.0% slower{}"), (3.0, "3.0 times as long{}"), (15.088, "15 times as long{}"),
     (0.2, "5.0 times as fast{}")],
)  # fmt: skip
def test_how_much_slower_one_is_in_words(second: float, words: str) -> None:
    """Two that are as fast as is shown are not told apart; a factor is not told as a percentage."""
    assert how_much_slower(1.0, second) == words.format("")
    whom = " as #1" if "as" in words.split() else " than #1"
    assert how_much_slower(1.0, second, "#1") == words.format(whom)
    takes = "takes " if "long" in words else "is "
    assert how_much_slower(1.0, second, verb=True) == takes + words.format("")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.388, "388 ms"), (12.04, "12.0 s"), (3599.0, "3599.0 s"), (384_127.0, "106 h 42 min")]
)
def test_a_step_of_hours_is_told_in_hours(seconds: float, text: str) -> None:
    assert show_step(seconds) == text and show_step(-seconds) == f"-{text}" and show_step(seconds, "+") == f"+{text}"


def test_a_terminal_is_as_wide_as_it_is() -> None:
    """Notes are wrapped, and a layout that does not fit into the table stands below its row, whole."""
    found = plan("tiny", "4xH200", sequence_length=256, batch="16seqs", fix="cp=1,pp=1/2,recompute=none")
    wide = as_text_whole(found, found.best, 1.0, ["Why: " + "because " * 20])
    narrow = as_text_whole(found, found.best, 1.0, ["Why: " + "because " * 20], 80)
    assert max(map(len, wide.splitlines())) > 80 >= max(map(len, narrow.splitlines()))
    layouts = [found.ask.text(timed.layout) for timed in found.layouts]
    assert all(f"\n    {layout}\n" in narrow for layout in layouts)
    assert wide.split() != narrow.split()
    assert sorted(wide.split()) == sorted(narrow.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([Change("batch size", 2.0)], "X would overtake #1 with batch size ×2."),
        (
            [Change("batch size", None), Change("sequence length", None, 4)],
            "X would not overtake #1 with batch size up to ×8, or sequence length up to ×4.",
        ),
        (
            [Change("intra-node bandwidth", 2.53), Change("batch size", None)],
            "X would overtake #1 with intra-node bandwidth ×2.5, not with batch size up to ×8.",
        ),
    ],
)
def test_what_would_let_another_win(changes: list[Change], said: str) -> None:
    assert sentence("X", changes) == said


def test_one_layout(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, "--layout", "tp=2,zero=1,mbs=4", "--json")
    (layout,) = json.loads(told.out)["layouts"]
    assert (layout["layout"]["dp"], layout["layout"]["tp"], layout["layout"]["zero"]) == (2, 2, 1)
    assert layout["gradient_accumulation_steps"] == 2


def test_a_tensor_group_over_nodes_is_asked_for_in_words(tell: Tell) -> None:
    """As in the search, which does not look at such layouts either."""
    words = ["plan", "tiny", "--gpus", "2x4xH200", "--seq", "256", "--batch", "16seqs", "--layout", "tp=8"]
    told = tell(*words)
    assert (told.code, told.out) == (2, "")
    assert told.err == (
        "error[LAYOUT]: tp crosses a node · --layout · found tp = 8 on nodes of 4 / allowed tp = 1, 2, 4"
        " · fix: --tp-across-nodes\n"
    )
    assert tell(*words, "--tp-across-nodes").code == 0


def test_a_sequence_beyond_the_models_positions_is_noted(tell: Tell) -> None:
    words = ["plan", "tiny", "--gpus", "1xH200", "--layout", "mbs=1", "--batch", "8seqs", "--seq"]
    note = f"{2 * TINY.max_positions} tokens of a sequence are more than the {TINY.max_positions} positions of tiny"
    assert f"Note: {note}\n" in tell(*words, 2 * TINY.max_positions).out
    assert json.loads(tell(*words, 2 * TINY.max_positions, "--json").out)["notes"] == [note]
    assert "Note:" not in tell(*words, TINY.max_positions).out
    assert json.loads(tell(*words, TINY.max_positions, "--json").out)["notes"] == []


def test_models_are_listed(tell: Tell) -> None:
    lines = tell("plan", "--models").out.splitlines()
    assert len(lines) == 1 + len(catalog.names())
    assert ["llama-3.1-8b", "8.03B", "131072", "meta-llama/Llama-3.1-8B"] in [line.split() for line in lines]
    listed = json.loads(tell("plan", "--models", "--json").out)["models"]
    assert {m["name"]: m["parameters"] for m in listed}["llama-3.1-8b"] == 8_030_261_248


def test_a_number_that_cannot_be_is_refused_before_the_work(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["plan", *TINY_STEP, "--fix", "cp=1,pp=1,tp=1"]
    told = json.loads(tell(*few, "--top", 1000, "--json").out)
    listed, looked_at = len(told["layouts"]), told["counts"]["enumerated"]  # not all: some have more than they need
    assert listed < looked_at
    long = [*few, "--top", 1000, "--why"]
    refused = f"· --why · found {looked_at} / allowed 1 to {listed} · fix: --why {listed}\n"
    assert tell(*long, looked_at).err == f"error[NUMBER]: no layout of that number {refused}"
    monkeypatch.setattr(sys.modules["penteract.planner.plan"], "Frontier", None)  # prices
    assert f"found {looked_at + 1} / allowed 1 to {looked_at} " in tell(*long, looked_at + 1).err
    wanted = "error[NUMBER]: the table has no layout of that number · --why · found 11 / allowed 1 to 10 (--top)"
    assert tell(*few, "--why", 11).err == f"{wanted} · fix: --top 11 --why 11\n"


def test_why_is_short_unless_all_is_asked_for(tell: Tell) -> None:
    """The largest parts, with what the smaller ones add up to; every row with its formula only by --all."""
    words = ["plan", *TINY_STEP, "--layout", "tp=2,pp=2,zero=1,mbs=4"]
    plain, short, whole = (tell(*words, *more).out for more in ([], ["--why", 1], ["--why", 1, "--all"]))
    added = short.count("\n") - plain.count("\n")
    assert 15 < added < 30 and whole.count("\n") > short.count("\n") + 50
    (title,) = re.findall(r"What takes the memory of the fullest GPU, of pipeline rank \d: (\S+ MiB), the", short)
    assert f": {title}\n" in plain  # as the layout's own memory
    assert sum(map(float, re.findall(r"(\d+\.\d)%  ", short))) == pytest.approx(300, abs=1.5)
    assert "--why 1 --all prints every row with its formula" in short and "Rates, " not in short
    for word in ("4·B·S·F/(cp·tp)", "Rates, ", "hidden size;"):
        assert word in whole and word not in short, word
    refused = tell(*words, "--all")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "error[USAGE]: every row of which layout? · --all · found no --why · fix: --why 1 --all\n"


def test_nothing_fits_is_told_and_is_an_error(tell: Tell) -> None:
    words = ["plan", "llama-3.1-8b", "--gpus", "1xA100-40GB", "--fix", "mbs=1,recompute=full,cp=1,pp=1"]
    told = tell(*words)
    need = "1xA100-40GB · found 124.24 GiB a GPU / allowed 36.24 GiB"
    line = f"error[FIT]: no layout fits · {need} · fix: --gpus 4xA100-40GB\n"
    assert (told.code, told.err) == (2, line)
    assert "Next:" not in told.out  # nothing can be written or trained
    assert "Nothing fits. The nearest:" in told.out
    as_json = tell(*words, "--json")
    assert (as_json.code, as_json.err) == (2, line)
    found = json.loads(as_json.out)
    assert found["layouts"] == [] and found["counts"]["fit"] == 0
    assert found["nearest_misses"][0]["over_gib"] > 0
    assert tell(*words, "--out", "run.toml").code == 2


def test_a_run_file_trains_the_layout(tell: Tell, tmp_path: Path) -> None:
    told = tell("plan", *TINY_STEP, "--layout", "tp=2,pp=2,recompute=full,mbs=2", "--out", "run.toml")
    assert told.code == 0
    assert (
        'Before training, edit run.toml: training.steps = 1000, data.source = "builtin" (Python\'s library) and '
        'tokenizer.source = "bytes" are placeholders. '
        "No checkpoint is saved before the end: checkpoint.every sets how often.\n"
    ) in told.out
    written = (tmp_path / "run.toml").read_text()
    assert written.startswith(
        "# A planned run: every value, and where it came from. Train it:\n#   penteract train run.toml\n"
    )
    run = resolve(tmp_path / "run.toml").run
    assert run.model == TINY
    assert (run.layout.tp, run.layout.pp, run.layout.recompute, run.layout.micro_batch_size) == (2, 2, ("*",), 2)
    assert (run.sequence_length, run.layout.global_batch_size, run.precision.dtype) == (256, 16, "bf16")
    assert run.layout == exact(plan("tiny", "4xH200", sequence_length=256, batch="16seqs", layout="tp=2,pp=2").ask,
                               parse_settings("tp=2,pp=2,recompute=full,mbs=2", flag="", several=False))  # fmt: skip


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
    assert told.code not in (0, 2) and told.err == "error[DISK]: No space left on device · --trace x.json\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lama-3.1-8b", "--gpus", "8xH200"], "error[MODEL]: no published model of that name"),
        (["none.json", "--gpus", "8xH200"], "error[FILE]: cannot be read"),
        (["tiny", "--gpus", "8xH2000"], "error[GPU]: no such GPU"),
        (["tiny", "--gpus", "12xH200"], "error[CLUSTER]"),
        (
            ["tiny", "--gpus", "h200x8@efa"],
            "error[CLUSTER]: the number comes first · --gpus · found h200x8@efa / allowed [nodes x] devices x name"
            " [@ fabric] · fix: --gpus 8xH200@efa",
        ),
        (["tiny", "--gpus", "H200 x 8 x 2"], "error[CLUSTER]: the number comes first"),
        (["tiny", "--gpus", "B300x8"], "error[GPU]: no such GPU · found B300 /"),
        (["tiny"], "error[USAGE]: on which GPUs? · --gpus"),
        (["--gpus", "8xH200"], "error[USAGE]: which model?"),
        (["tiny", "--gpus", "8xH200", "--seq", "0"], "error[VALUE]: no length of a sequence · --seq · found 0"),
        (["tiny", "--gpus", "8xH200", "--batch", "1M"], "error[BATCH]: no whole number of sequences of 8192 tokens"),
        (["tiny", "--gpus", "8xH200", "--batch", "128"], "error[BATCH]: less than a sequence of 8192 tokens"),
        (["tiny", "--gpus", "8xH200", "--batch", "many"], "error[BATCH]: not a batch"),
        (["tiny", "--gpus", "8xH200", "--batch", "0"], "error[BATCH]: an empty batch"),
        (["gpt2", "--gpus", "8xH200", "--seq", "2048"], "error[LAYOUT]: the learned table has 1024 positions"),
        (["tiny", "--gpus", "8xH200", "--layout", "tp=3"], "error[LAYOUT]: tp·pp·cp = 3·1·1 does not divide"),
        (["tiny", "--gpus", "8xH200", "--layout", "tp=2,tpp=3"], "error[SETTING]: no such setting"),
        (["tiny", "--gpus", "8xH200", "--layout", "tp=2/4"], "error[SETTING]: a setting takes one value"),
        (["tiny", "--gpus", "8xH200", "--layout", "schedule=zb"], "error[SETTING]: no such schedule"),
        (["tiny", "--gpus", "8xH200", "--fix", "tp=3"], "error[SETTING]: no layout of 8 GPUs has these values"),
        (
            ["tiny", "--gpus", "8xH200", "--fix", "shard_group=3"],
            "error[SETTING]: no layout can have these values: shard_group does not divide dp·cp",
        ),
        (["tiny", "--gpus", "8xH200", "--fix", "tp=x"], "error[SETTING]: not a size"),
        (["tiny", "--gpus", "8xH200", "--headroom", "1"], "error[VALUE]: not a share"),
        (
            ["tiny", "--gpus", "8xH200", "--imbalance", "0.9"],
            "error[VALUE]: the fullest GPU gets no less than the mean",
        ),
        (["tiny", "--gpus", "8xH200", "--precision", "fp4"], "error[PRECISION]"),
        (["tiny", "--gpus", "8xH200", "--top", "0"], "error[VALUE]"),
        (["tiny", "--gpus", "8xH200", "--tokens", "lots", "--layout", "mbs=1"], "error[VALUE]: not a number of tokens"),
        (["tiny", "--gpus", "8xH200", "--tokens", "0", "--layout", "mbs=1"], "error[VALUE]: not a number of tokens"),
        (["tiny", "--gpus", "1xH200", "--layout", "mbs=1", "--out", "no/run.toml"], "error[FILE]: cannot be written"),
        (["tiny", "--gpus", "1xH200", "--layout", "mbs=1", "--why", "2"], "error[NUMBER]: no layout of that number"),
        (["llama-3.1-8b", "--gpus", "8xH200", "--why", "99"], "error[NUMBER]: the table has no layout of that number"),
    ],
)
def test_refusals_are_a_line_in_no_time(tell: Tell, words: list[str], line: str) -> None:
    started = time.process_time()
    told = tell("plan", *words)
    assert time.process_time() - started < 1
    assert told.code == 2, told.out
    assert told.err.startswith(line)
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--fix tp=2,4", "found tp=2,4 · fix: --fix tp=2/4"),
        ("--fix zero=1,pp=2/4,8,tp=2", "found pp=2/4,8 · fix: --fix pp=2/4/8"),
        ("--layout tp=2,4", "found tp=2,4 · fix: --layout tp=2, or --fix tp=2/4"),
        ("--layout tp=2/4", "found tp=2/4 · fix: --layout tp=2, or --fix tp=2/4 for the best with any of them"),
        ("--fix recompute=none,full", "found recompute=none,full · fix: --fix recompute=none/full"),
        (
            "--fix recompute=swiglu,rope",
            "fix: --fix recompute=swiglu+rope, or --fix recompute=swiglu/rope for each alone",
        ),
        ("--layout recompute=swiglu,rope", "found recompute=swiglu,rope · fix: --layout recompute=swiglu+rope"),
        ("--layout zero", "a setting takes a value · --layout · found zero · fix: --layout zero=…"),
        (
            "--layout pp=4,vpp=2",
            "found 1f1b / allowed interleaved, gpipe · fix: --layout dp=2,pp=4,schedule=interleaved,vpp=2,mbs=1",
        ),
        ("--fix recompute=ful", "--fix recompute · found ful / allowed full · fix: --fix recompute=full"),
        ("--layout recompute=non", "--layout recompute · found non / allowed none · fix: --layout recompute=none"),
        ("--fix recompute=swiglu+ful", "found ful / allowed full, none, add, "),
        ("--layout offload=non", "--layout offload · found non / allowed none · fix: --layout offload=none"),
        (
            "--batch 8k",
            "--batch · found 8000 / allowed 8192 tokens, or sequences · fix: --batch 8192",
        ),
        ("--batch 128", "fix: --batch 128seqs"),
        ("--seq 8k", "two lengths go by that · --seq · found 8k / allowed 8Ki (8192 tokens), 8000 · fix: --seq 8Ki"),
        ("--seq long", "no length of a sequence · --seq · found long / allowed tokens: 8192, or 8Ki · fix: --seq 8192"),
    ],
)
def test_a_refusal_says_how_it_is_written(tell: Tell, words: str, line: str) -> None:
    told = tell("plan", "llama-3.1-8b", "--gpus", "8xH200", *words.split())
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert line in told.err


def test_a_length_in_binary_thousands(tell: Tell) -> None:
    told = tell("plan", "tiny", "--gpus", "8xH200", "--layout", "mbs=1", "--batch", "8seqs", "--seq", "4Ki")
    assert "sequence length 4096 · 32 768 tokens a step (8 sequences)" in told.out


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["8xH200", "--fix", "tp=3"], "--fix tp=2/4"),
        (["6xH200", "--fix", "tp=3,zero=1"], "--fix tp=1/2,zero=1"),
        (["8xH200", "--fix", "pp=2,tp=6/3"], "--fix pp=2,tp=2/4"),
        (["8xH200", "--fix", "dp=2,tp=2,pp=4"], "--fix dp=1,tp=2,pp=4"),
        (["8xH200", "--fix", "shard_group=3"], "--fix shard_group=2/4"),
        (["8xH200", "--fix", "zero=0,reshard_after_step=true"], "--fix zero=3,reshard_after_step=true"),
        (["8xH200", "--fix", "micro_batch_size=5"], "--fix micro_batch_size=4/6"),
        (["8xH200", "--fix", "schedule=interleaved,pp=1"], "--fix schedule=1f1b,pp=1"),
        (["8xH200", "--fix", "tp=3,pp=3"], "leave one out"),
    ],
)
def test_values_that_would_go_are_named_and_do(tell: Tell, words: list[str], fix: str) -> None:
    one = ["plan", "tiny", "--seq", "256", "--batch", "48seqs", "--top", "1", "--gpus"]
    told = tell(*one, *words)
    assert (told.code, told.err.strip().split(" · fix: ")[1]) == (2, fix)
    if fix.startswith("--fix"):
        assert tell(*one, words[0], *fix.split()).code == 0


@pytest.mark.parametrize("flag", ["--fix", "--layout"])
def test_words_that_are_none_are_mended_where_they_were_said(tell: Tell, flag: str) -> None:
    told = tell("plan", *TINY_STEP, flag, "mbs=1,recompute=swiglu+norm")
    assert told.code == 2 and f"has this name · {flag} recompute · found norm /" in told.err
    assert told.err.strip().endswith(f"fix: {flag} recompute=rms_norm")


def test_a_fix_is_a_layout_that_is_priced(tell: Tell) -> None:
    words = ["plan", "tiny", "--gpus", "8xH200", "--seq", "256", "--batch", "16seqs", "--json"]
    told = tell(*words, "--layout", "tp=3,pp=5")
    fix = told.err.split(" · fix: ")[1].split()
    assert fix[0] == "--layout"
    assert tell(*words, *fix).code == 0


def test_a_layout_reads_back_as_it_is_written() -> None:
    lay = Layout(dp=2, tp=2, cp=2, cp_method="ring", schedule="gpipe", zero=3, shard_group=2, reduce_scatter_once=True,
                 recompute=("*",), recompute_every=2, recompute_else=("swiglu",), offload=("layer_inputs",),
                 micro_batch_size=3,
                 loss="reference", loss_chunk=64, bucket_bytes=0)  # fmt: skip
    text = as_text(lay, Layout())
    assert "elementwise" not in text
    assert "elementwise=reference" in as_text(lay, Layout(elementwise="triton"))  # where the GPU has kernels
    settings = parse_settings(text, flag="--layout", several=False)
    written = {name: value for name, (value,) in settings.items()}
    assert written == {"dp": 2, "tp": 2, "cp": 2, "cp_method": "ring", "schedule": "gpipe", "zero": 3,
                       "shard_group": 2, "reduce_scatter_once": True, "recompute": "full", "recompute_every": 2,
                       "recompute_else": "swiglu", "offload": "layer_inputs", "micro_batch_size": 3,
                       "loss": "reference",
                       "loss_chunk": 64, "bucket_bytes": 0}  # fmt: skip


def test_why_in_json_has_the_terms_of_memory(tell: Tell) -> None:
    """Row by row they are the memory of the layout; without --why they are left out."""
    words = ["plan", *TINY_STEP, "--layout", "tp=2,zero=1,mbs=4", "--json"]
    found = json.loads(tell(*words, "--why", "1").out)
    rows, kinds = found["terms"]["rows"], found["layouts"][0]["memory"]
    gib = sum(row["value"] for row in rows if row["kind"] == "optimizer") / 2**30
    assert gib == pytest.approx(kinds["optimizer_gib"]) and {"formula", "line", "each"} <= rows[0].keys()
    assert "terms" not in json.loads(tell(*words).out)


def test_a_layout_in_json_is_one_of_layout(tell: Tell) -> None:
    """Its keys and values, joined, price the same layout; the accumulation steps are beside it."""
    words = ["plan", "tiny-moe", "--gpus", "8xH200", "--seq", "256", "--batch", "32seqs", "--json"]
    for found in json.loads(tell(*words, "--top", "4").out)["layouts"]:
        text = ",".join(f"{name}={as_word(value)}" for name, value in found["layout"].items())
        assert json.loads(tell(*words, "--layout", text).out)["layouts"] == [found]


def test_every_field_of_a_layout_is_a_setting() -> None:
    """But the accumulation steps, which follow from the batch."""
    assert {f.name for f in dataclasses.fields(Layout)} - {"gradient_accumulation_steps"} == {*LAYOUT_SETTINGS}


@pytest.mark.parametrize(
    ("gpus", "words", "kernel", "written"),
    [
        ("8xH200", "ep=8,zero=1", "quack", ""),
        ("8xB200", "ep=8,zero=1", "grouped", ""),
        ("8xA100", "ep=8,zero=3,recompute=full", "reference", ""),
        ("8xMI300X", "ep=8,zero=1", "reference", ""),
        ("8xH200", "ep=8,zero=1,experts=reference", "reference", ",experts=reference"),
        ("8xH200", "ep=8,zero=1,experts=grouped", "grouped", ",experts=grouped"),
    ],
)
def test_experts_have_the_fastest_kernel_of_the_gpu(
    tell: Tell, tmp_path: Path, gpus: str, words: str, kernel: str, written: str
) -> None:
    """It is priced, shown only where it is not the default, and written for the run."""
    one = ("plan", "qwen3-30b-a3b", "--gpus", gpus, "--seq", "1024", "--batch", "8seqs", "--layout", words)
    told = tell(*one, "--out", "run.toml")
    assert told.code == 0, told.err
    assert resolve(tmp_path / "run.toml").run.layout.experts == kernel
    assert ("experts=" in told.out) == bool(written) and f"{written}: " in told.out
    assert json.loads(tell(*one, "--json").out)["layouts"][0]["layout"].get("experts", "reference") == kernel


def test_layouts_are_ranked_over_several_precisions(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, "--precision", "bf16,bf16_pure", "--top", "8", "--json")
    found = json.loads(told.out)
    assert found["step"]["precisions"] == ["bf16", "bf16_pure"]
    assert {layout["precision"] for layout in found["layouts"]} == {"bf16", "bf16_pure"}
    one = json.loads(tell("plan", *TINY_STEP, *FEW, "--precision", "bf16_pure", "--json").out)
    other = json.loads(tell("plan", *TINY_STEP, *FEW, "--json").out)
    assert found["counts"]["enumerated"] == one["counts"]["enumerated"] + other["counts"]["enumerated"]
    firsts = [one["layouts"][0], other["layouts"][0]]  # as fast as each other where the host cannot launch faster
    least = min(lay["time"]["step_s"] for lay in firsts)
    assert found["layouts"][0] in [lay for lay in firsts if lay["time"]["step_s"] == least]
    assert "bf16_pure" in tell("plan", *TINY_STEP, *FEW, "--precision", "bf16,bf16_pure", "--why", "1").out


def test_a_run_file_has_what_the_plan_chose(tell: Tell, tmp_path: Path) -> None:
    written = "zero=3,reshard_after_step=true,recompute=full,recompute_every=2,loss_chunk=64,bucket_bytes=1048576"
    told = tell("plan", *TINY_STEP, "--layout", written, "--precision", "bf16_pure", "--out", "run.toml")
    assert told.code == 0, told.err
    run = resolve(tmp_path / "run.toml").run
    lay = run.layout
    assert (lay.zero, lay.reshard_after_step, lay.recompute_every, lay.loss, lay.loss_chunk) == (
        3,
        True,
        2,
        "chunked",
        64,
    )
    assert (lay.bucket_bytes, run.precision.policy) == (2**20, RECIPES["bf16_pure"])


def test_precision_by_name_is_priced_and_written(tell: Tell, tmp_path: Path) -> None:
    one = (*TINY_STEP, "--layout", "zero=1", "--json")
    plain, in_int8, but = (
        json.loads(tell("plan", *one, *words).out)["layouts"][0]["memory"]["optimizer_gib"]
        for words in ((), ("--modules", "*:moments=int8"), ("--modules", "*:moments=int8,embedding*:moments=fp32"))
    )
    assert in_int8 < but < plain
    told = tell("plan", *one, "--precision", "fp8_rowwise", "--modules", "*.o.*:linears=bf16", "--out", "run.toml")
    assert told.code == 0, told.err
    modules = (Pattern("*.o.*", "linears", "bf16"),)
    assert resolve(tmp_path / "run.toml").run.precision.policy == replace(RECIPES["fp8_rowwise"], modules=modules)
    told = tell("plan", *one, "--modules", "embeding*:moments=int8")
    assert told.code == 2 and "--modules · found embeding*:moments=int8 / allowed embedding.weight" in told.err


def test_only_prices_are_loaded() -> None:
    """No torch, nothing that computes, and few modules: it starts in a blink."""
    code = (
        "import sys; from penteract.cli import main;"
        "code = main(['plan', 'tiny', '--gpus', '1xH200', '--layout', 'mbs=1', '--seq', '256', '--batch', '8seqs']);"
        "heavy = {'torch', 'numpy', 'safetensors', 'tokenizers'} & set(sys.modules);"
        "own = [m for m in sys.modules if m.startswith('penteract.engine')];"
        "sys.exit(str((code, heavy, own, len(sys.modules))) if code or heavy or len(sys.modules) > 700 else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

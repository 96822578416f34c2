"""What `penteract plan` prints: the table, what it says of it, and the lists that it has."""

from __future__ import annotations

import json
import re

import pytest

from cli.plan.tiny_step import FEW, TINY_STEP, Tell
from penteract import plan
from penteract.config import catalog
from penteract.config.layout import Layout
from penteract.config.resolve.presets import TINY
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.planner.report.as_text import as_text_whole
from penteract.planner.report.explain import how_much_slower
from penteract.planner.report.what_if import Change, sentence
from penteract.planner.space.legality import reason
from penteract.units import show_step


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
    for word in ("4·B·S·F", "Rates, ", "hidden size;"):
        assert word in whole and word not in short, word
    refused = tell(*words, "--all")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "error[USAGE]: every row of which layout? · --all · found no --why · fix: --why 1 --all\n"


def test_a_length_in_binary_thousands(tell: Tell) -> None:
    told = tell("plan", "tiny", "--gpus", "8xH200", "--layout", "mbs=1", "--batch", "8seqs", "--seq", "4Ki")
    assert "sequence length 4096 · 32 768 tokens a step (8 sequences)" in told.out


def test_a_model_with_mtp_has_both_sizes_wherever_it_is_named(tell: Tell) -> None:
    assert " 671B (683B with MTP) " in tell("plan", "--models").out
    one = tell("plan", "deepseek-v3", "--gpus", "64x8xH200", "--layout", "tp=8,pp=16,ep=4,zero=1,recompute=full").out
    assert " with MTP, 671B without · " in one and "683B parameters" in one


def test_a_reason_without_its_numbers_is_a_sentence() -> None:
    case = Case(model=TINY, layout=Layout(pp=TINY.layers + 1), sequence_length=256)
    assert "pp·vpp is more stages than the layers" in map(reason, breaches(case))


def test_memory_in_use_and_what_is_left_for_it_are_one_sentence(tell: Tell) -> None:
    told = tell("plan", "llama-3.1-8b", "--gpus", "8xH200", "--layout", "zero=1").out
    assert "with libraries, the CUDA context and communicators, for which 8% of its memory are left" in told

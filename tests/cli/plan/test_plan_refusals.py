"""What `penteract plan` refuses is one line, at once, with a fix that is accepted."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from cli.plan.tiny_step import TINY_STEP, Tell


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


@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lama-3.1-8b", "--gpus", "8xH200"], "error[MODEL]: no published model of that name"),
        (["none.json", "--gpus", "8xH200"], "error[FILE]: cannot be read"),
        (["tiny", "--gpus", "8xH2000"], "error[GPU]: no such GPU · --gpus · found H2000 /"),
        (["tiny", "--gpus", "0xH200"], "error[CLUSTER]: a cluster without devices · --gpus · found 0xH200"),
        (["tiny", "--gpus", "2x0xH200"], "error[CLUSTER]: a cluster without devices · --gpus · found 2x0xH200"),
        (["no-model", "--gpus", "8xH200"], "error[MODEL]: no published model of that name · model · found no-model"),
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
        (
            ["tiny", "--gpus", "8xH200", "--fix", "capacity_percent=50"],
            "error[SETTING]: not a size · --fix capacity_percent · found 50 / allowed 100 to 102400 · fix: "
            "capacity_percent=100",
        ),
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


@pytest.mark.parametrize(
    ("model", "gpus", "line"),
    [
        ("run.toml", "8xH200", "error[FILE]: it is no config.json of a model · model · found run.toml"),
        ("notes.md", "8xH200", "error[FILE]: it is no config.json of a model · model · found notes.md"),
        ("tiny", "run.toml", "error[FILE]: it is no file of calibrate · --gpus · found run.toml"),
        ("tiny", "notes.md", "error[FILE]: it is no file of calibrate · --gpus · found notes.md"),
    ],
)
def test_a_file_of_another_kind_is_called_so(tell: Tell, tmp_path: Path, model: str, gpus: str, line: str) -> None:
    (tmp_path / "run.toml").write_text('preset = "tiny"\n')
    (tmp_path / "notes.md").write_text("# notes\n")
    told = tell("plan", model, "--gpus", gpus)
    assert told.code == 2 and told.err.startswith(line) and told.err.count("\n") == 1
    assert " · fix: " in told.err and len(told.err) < 300


def test_a_slip_in_the_name_of_gpus_is_mended_where_it_was_said(tell: Tell) -> None:
    assert tell("plan", "tiny", "--gpus", "2x8xH20@efa").err.strip().endswith("fix: --gpus 2x8xH200@efa")

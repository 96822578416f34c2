"""`penteract plan` with the parts of a precision: what is priced, told and written, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.plan.tiny_step import FEW, TINY_STEP, Tell
from penteract import plan
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import PARTS
from penteract.errors import BadInput
from penteract.planner.report.explain import how_much_slower

FP8 = ["--precision", "fp8_tensorwise"]
# Of each part a value, and a recipe that can have it. `gradient` decides `reduce` where nothing else does.
VALUES = {
    "gradient": ("bf16", "bf16"), "reduce": ("bf16", "bf16"), "master": ("bf16", "none"), "moments": ("bf16", "int8"),
    "loss_scale": ("fp16", "1024"), "loss_scale_growth_every": ("fp16", "7"),
    "fp8_bf16_layers": ("fp8_rowwise", "1,1"), "fp8_gradient": ("fp8_rowwise", "e4m3"),
    "fp8_round_scales": ("fp8_rowwise", "true"), "fp8_history": ("fp8_delayed", "4"),
    "fp8_block": ("fp8_blockwise", "64"), "fp8_gather": ("fp8_tensorwise", "true"),
    "fp8_fast_accumulation": ("fp8_tensorwise", "true"), "fp8_experts": ("fp8_rowwise", "true"),
    "modules": ("bf16", "embedding*:moments=int8"),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_told_and_written_and_is_that_of_train(part: str, tell: Tell, tmp_path: Path) -> None:
    """What `train` makes of the same words is what `plan` prices, names and writes."""
    recipe, value = VALUES[part]
    words = [f"--precision.{part}", value]
    model, *step = TINY_STEP
    model = "tiny-moe" if part == "fp8_experts" else model
    asked = ("plan", model, *step, "--layout", "zero=3", "--precision", recipe, *words)
    told = tell(*asked, "--json", "--out", "run.toml")
    assert told.code == 0, told.err
    policy = resolve(overrides=["--precision.dtype", recipe, *words]).run.precision.policy
    assert policy != RECIPES[recipe]
    assert resolve(tmp_path / "run.toml").run.precision.policy == policy
    found = json.loads(told.out)
    assert policy.name != recipe
    assert found["step"]["precision"] == found["layouts"][0]["precision"] == policy.name
    assert policy.name in tell(*asked).out.splitlines()[0]


def test_a_precision_without_a_row_is_named_below_the_table_with_its_best(tell: Tell) -> None:
    asked = ("plan", *TINY_STEP, *FEW, "--precision", "bf16,fp32", "--top")
    lines = tell(*asked, "1").out.splitlines()
    fast, slow = sorted(
        (plan("tiny", "4xH200", sequence_length=256, batch="16seqs", fix=FEW[1], precision=name).best
         for name in ("bf16", "fp32")), key=lambda one: one.time.seconds)  # fmt: skip
    (told,) = (line for line in lines if line.startswith(("In bf16: ", "In fp32: ")))
    at = lines.index(told)
    assert lines[at - 1].lstrip().startswith("1  dp=") and lines[at + 1].startswith("Not tried")
    assert told.startswith(f"In {slow.estimate.precision.name}: dp=")
    assert told.endswith(f" a step, {how_much_slower(fast.time.seconds, slow.time.seconds, '#1')}")
    found = json.loads(tell(*asked, "1", "--json").out)
    (other,) = found["unlisted_precisions"]
    assert {other["precision"], found["layouts"][0]["precision"]} == {"bf16", "fp32"}
    assert other["best"]["precision"] == other["precision"] == slow.estimate.precision.name
    assert other["best"]["time"]["step_s"] == pytest.approx(slow.time.seconds)
    assert json.loads(tell(*asked, "100", "--json").out)["unlisted_precisions"] == []
    assert "\nIn bf16: " not in (all_of_them := tell(*asked, "100").out) and "\nIn fp32: " not in all_of_them


def test_sentences_name_their_precision_where_there_are_several(tell: Tell) -> None:
    asked = ("plan", *TINY_STEP, *FEW, "--precision")
    told = tell(*asked, "bf16,fp32").out
    own = next(line.split()[2] for line in told.splitlines() if line.startswith(" 1  dp="))
    assert own in ("bf16", "fp32")
    assert re.search(rf"^Fit: \S+ in {own} is the simplest that fits", told, re.MULTILINE)
    assert f"\nSpeed in {own}: " in told and "\nSpeed: " not in told
    told = tell(*asked, "fp32").out
    assert re.search(r"^Fit: \S+ is the simplest that fits", told, re.MULTILINE) and "\nSpeed: " in told


def test_parts_apply_to_each_recipe(tell: Tell) -> None:
    words = ["--precision", "bf16,fp8_tensorwise", "--precision.moments", "int8", "precision.reduce=bf16"]
    found = json.loads(tell("plan", *TINY_STEP, *FEW, *words, "--json").out)
    names = ["bf16, reduce bf16, moments int8", "fp8_tensorwise, reduce bf16, moments int8"]
    assert found["step"]["precisions"] == names
    optimizer = [
        json.loads(tell("plan", *TINY_STEP, "--layout", "mbs=1", *w, "--json").out)["layouts"][0]["memory"]
        for w in ((), ("--precision.moments", "int8"))
    ]
    assert optimizer[1]["optimizer_gib"] < optimizer[0]["optimizer_gib"]
    assert optimizer[1]["parameters_gib"] == pytest.approx(optimizer[0]["parameters_gib"], rel=1e-3)  # whole blocks


def test_gathering_in_fp8_is_answered_among_zero_3(tell: Tell) -> None:
    told = tell("plan", *TINY_STEP, *FEW, *FP8, "--precision.fp8_gather", "true", "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert found["layouts"] and {row["layout"]["zero"] for row in found["layouts"]} == {3}
    why = "weights are gathered in FP8 only where ZeRO 3 shards them"
    assert found["counts"]["refused"][why] > 0
    assert found["counts"]["enumerated"] == found["counts"]["fit"] + sum(found["counts"]["refused"].values())
    none = tell("plan", *TINY_STEP, "--fix", "zero=0/1,pp=1,cp=1", *FP8, "--precision.fp8_gather", "true")
    assert none.code == 2 and why in none.out and "No layout is possible" in none.out
    assert none.err.startswith(f"error[FIT]: no layout is possible: each breaks a rule · 4xH200 · found {why} · fix: ")


def test_modules_by_either_name(tell: Tell, tmp_path: Path) -> None:
    one = ("plan", *TINY_STEP, "--layout", "mbs=1")
    for n, flag in enumerate(("--modules", "--precision.modules")):
        assert tell(*one, flag, "*:moments=int8,head*:moments=fp32", "--out", f"{n}.toml").code == 0
        modules = (Pattern("*", "moments", "int8"), Pattern("head*", "moments", "fp32"))
        assert resolve(tmp_path / f"{n}.toml").run.precision.policy == replace(RECIPES["bf16"], modules=modules)
    assert tomllib.loads((tmp_path / "0.toml").read_text()) == tomllib.loads((tmp_path / "1.toml").read_text())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--precision.fp8_gather", "true"],
            "error[PRECISION]: only FP8 recipes have this · precision.fp8_gather"
            " · found true in bf16 / allowed none · fix: --precision.fp8_gather auto",
        ),
        (
            ["--precision", "bf16_pure,bf16", "--precision.master", "fp32", "--precision.gradient", "fp64"],
            "error[PRECISION]: does not go with bf16 and the rest of its recipe · precision.gradient"
            " · found fp64 / allowed fp32, bf16 · fix: --precision.gradient fp32",
        ),
        (
            ["--precision", "fp8_rowwise", "--precision.fp8_gather", "true"],
            "error[PRECISION]: no such recipe of FP8 · precision.fp8_gather · found true in fp8_rowwise"
            " / allowed true in fp8_tensorwise"
            " · fix: --precision.fp8_gather false, or --precision fp8_tensorwise",
        ),
        (
            [*FP8, "--modules", "*:linears=bf16"],
            "error[PRECISION]: leaves no linear layer in FP8 · --modules · found *:linears=bf16"
            " / allowed one linear layer in FP8 or more · fix: --precision bf16",
        ),
        (
            [*FP8, "--precision.fp8_gather", "true", "--layout", "zero=1"],
            "error[FP8]: weights are gathered in FP8 only where ZeRO 3 shards them"
            " · precision.fp8_gather · found zero = 1 / allowed zero = 3"
            " · fix: --layout zero=3, or --precision.fp8_gather false",
        ),
        (
            ["--precision", "bf16/bf16_pure"],
            "error[PRECISION]: several precisions are joined by commas · --precision · found bf16/bf16_pure"
            f" / allowed {', '.join(RECIPES)} · fix: --precision bf16,bf16_pure\n",
        ),
        (
            ["--precision", "bf16,fp7"],
            "error[PRECISION]: no such precision · --precision · found fp7"
            f" / allowed {', '.join(RECIPES)} · fix: --precision bf16,fp8_tensorwise\n",
        ),
        (["--precision", "FP8_Rowwise"], "· fix: --precision fp8_rowwise\n"),
        (["--precision", "float32"], "· fix: --precision fp32\n"),
        (["--precision", "bfloat16"], "· fix: --precision bf16\n"),
        (["--precision", ""], "· fix: --precision bf16\n"),
        (
            ["--precision.moments", "int4"],
            "error[VALUE]: not a value for this key · precision.moments (--precision.moments)"
            ' · found "int4" / allowed auto or fp64 or fp32 or bf16 or int8',
        ),
        (
            ["--precision.moment", "int8"],
            "error[KEY]: unknown key · --precision.moment · found precision.moment"
            " · fix: did you mean precision.moments?",
        ),
        (["--precision.moments"], "error[USAGE]: an override without a value · --precision.moments"),
        (
            ["--precision.dtype", "fp16"],
            "error[USAGE]: plan takes only [precision] keys · --precision.dtype · found fp16"
            " / allowed precision.gradient, ",
        ),
        (["--precision.dtype", "fp16"], "fix: --precision fp16"),
        (["precision.device=cpu"], "fix: leave it out"),
        (["--parallel.tp", "2"], "fix: --fix tp=2"),
        (["--memory.recompute", "swiglu,rms_norm"], "fix: --fix recompute=swiglu+rms_norm"),
        (["--parallel.reshard_after_step", "true"], "fix: --fix reshard_after_step=true"),
        (["--batch.sequence_length", "512"], "fix: --seq 512"),
        (["--batch.global_batch_size", "512"], "fix: --batch 512seqs"),
        (["--optimizer.kind", "muon"], "fix: --optimizer muon"),
        (["--optimizer.learning_rate", "1"], "fix: leave it out"),
        (
            ["--modules", "*:moments=int8", "--precision.modules", "*:moments=bf16"],
            "error[USAGE]: patterns of names are given twice · --modules · found --precision.modules",
        ),
    ],
)
def test_what_cannot_be_is_a_line(tell: Tell, words: list[str], line: str) -> None:
    told = tell("plan", *TINY_STEP, *words)
    assert told.code == 2, told.out
    assert line in told.err and told.err.count("\n") == 1
    assert told.out == "" and "--parallel." not in told.err.split("fix:")[-1]


def test_from_python() -> None:
    asked: dict[str, Any] = {"sequence_length": 256, "batch": "16seqs", "layout": "mbs=1"}
    found = plan("tiny", "1xH200", parts={"moments": "int8"}, **asked)
    assert found.ask.precision == replace(RECIPES["bf16"], moments="int8")
    for parts, words in (
        ({"moments": "int4"}, "not a value for this key"),
        ({"moment": "int8"}, "unknown key"),
        ({"dtype": "bf16"}, "no part of a precision"),
    ):
        with pytest.raises(BadInput, match=words):
            plan("tiny", "1xH200", parts=parts, **asked)
    with pytest.raises(BadInput, match="a policy takes no parts"):
        plan("tiny", "1xH200", precision=RECIPES["bf16"], parts={"moments": "int8"}, **asked)


def test_kernels_follow_the_precision_and_are_named_where_they_are_not_the_usual(tell: Tell, tmp_path: Path) -> None:
    """What a plan writes is what the engine's check lets through: kernels compute in fp32."""
    for precision, kernels in (("bf16", "triton"), ("fp64", "reference")):
        out = f"{precision}.toml"
        assert tell("plan", *TINY_STEP, *FEW, "--precision", precision, "--out", out).code == 0
        assert resolve(tmp_path / out).run.layout.elementwise == kernels
    told = tell("plan", *TINY_STEP, "--layout", "zero=1,elementwise=reference")
    assert (
        "elementwise=reference" in told.out and "elementwise" not in tell("plan", *TINY_STEP, "--layout", "zero=1").out
    )
    for flag in ("--fix", "--layout"):
        refused = tell("plan", *TINY_STEP, "--precision", "fp64", flag, "elementwise=triton")
        assert refused.code == 2 and "found updates in fp64 / allowed fp32" in refused.err

"""Precision by module: which parameters a pattern is about, what a run file says of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.run import Precision
from penteract.errors import BadInput
from penteract.model.precision_patterns import check_modules, first_like
from penteract.planner.question import question
from penteract.step.program import Program, compile_step

MODEL = ModelSpec(layers=4, hidden_size=32, heads=2, kv_heads=2, head_size=16, ffn_size=64, vocab_size=64)
EXPERTS = replace(MODEL, moe=MoESpec(experts=4, top_k=2, ffn_size=32, dense_layers=(0, 1)), mtp_layers=1)


def by_name(name: str, *words: str) -> Policy:
    return replace(RECIPES[name], modules=tuple(map(Pattern.of, words)))


def in_fp8(p: Program) -> set[str]:
    return {op.site.params[0] for c in p.chunks for op in c.tape.ops if "fp8" in op.site.attrs}


def weights(layers: list[int], *names: str) -> set[str]:
    return {f"layers.{i}.{name}.weight" for i in layers for name in names}


ATTENTION = [f"attention.{x}" for x in "qkvo"]
MLP = [f"mlp.{x}" for x in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], weights([0, 1, 2, 3], *ATTENTION, *MLP)),
        (["layers.0.*:linears=bf16"], weights([1, 2, 3], *ATTENTION, *MLP)),
        (["*.attention.o.*:linears=bf16"], weights([0, 1, 2, 3], *ATTENTION[:3], *MLP)),
        (["*:linears=bf16", "*.mlp.*:linears=fp8", "layers.[0-2].*:linears=bf16"], weights([3], *MLP)),
    ],
)
def test_the_last_pattern_that_matches_decides_which_linears_are_in_fp8(words: list[str], found: set[str]) -> None:
    assert in_fp8(compile_step(MODEL, Layout(), 16, precision=by_name("fp8_rowwise", *words))) == found


def test_patterns_are_about_experts_where_these_are_in_fp8() -> None:
    experts = [f"layers.{i}.moe.experts.{x}" for i in (2, 3, 4) for x in ("gate", "up", "down")]
    by_rows = replace(RECIPES["fp8_rowwise"], fp8=Fp8(kind="rowwise", experts=True))

    def found(policy: Policy) -> set[str]:
        return {n for n in in_fp8(compile_step(EXPERTS, Layout(), 16, precision=policy)) if ".experts." in n}

    assert found(RECIPES["fp8_rowwise"]) == set()
    assert found(by_rows) == set(experts)
    but = replace(by_rows, modules=(Pattern.of("*.experts.down:linears=bf16"), Pattern.of("layers.2.*:linears=bf16")))
    assert found(but) == {n for n in experts if not n.startswith("layers.2") and "down" not in n}
    assert first_like(EXPERTS, but) == (0, 0, 2, 3)
    alone = replace(by_rows, modules=(Pattern.of("*:linears=bf16"), Pattern.of("*.experts.up:linears=fp8")))
    assert found(alone) == {n for n in experts if n.endswith("up")}
    with pytest.raises(BadInput, match="no linear layer has such a name"):
        check_modules(EXPERTS, by_name("fp8_rowwise", "*.experts.down:linears=bf16"))


def test_layers_at_both_ends_are_a_short_form_of_patterns() -> None:
    short = RECIPES["fp8_rowwise"].fp8
    assert short is not None
    ends = replace(RECIPES["fp8_rowwise"], fp8=replace(short, first=1, last=1))
    model = replace(MODEL, mtp_layers=1)
    said = by_name("fp8_rowwise", "layers.0.*:linears=bf16", "layers.[34].*:linears=bf16")
    both = [in_fp8(compile_step(model, Layout(), 16, precision=p)) for p in (ends, said)]
    assert both[0] == both[1] == weights([1, 2], *ATTENTION, *MLP)
    back = replace(ends, modules=(Pattern.of("layers.0.mlp.*:linears=fp8"),))
    assert in_fp8(compile_step(model, Layout(), 16, precision=back)) == both[0] | weights([0], *MLP)


def test_layers_are_alike_that_have_the_same_by_name() -> None:
    assert first_like(EXPERTS, RECIPES["bf16"]) == (0, 0, 2, 2)
    assert first_like(EXPERTS, by_name("bf16", "layers.1.*:moments=int8", "head*:moments=int8")) == (0, 1, 2, 2)
    assert first_like(MODEL, by_name("bf16", "layers.[03].mlp.up.*:moments=int8")) == (0, 1, 1, 0)
    assert first_like(MODEL, by_name("fp8_rowwise", "layers.2.mlp.up.*:linears=bf16")) == (0, 0, 2, 0)


def test_patterns_are_resolved_written_and_read_again(tmp_path: Path) -> None:
    words = ["*.mlp.down.weight:linears=bf16", "embedding*:moments=int8", "layers.[01].*:moments=bf16"]
    run = resolve(overrides=["--precision.dtype=fp8_rowwise", f"--precision.modules={','.join(words)}"])
    policy = run.run.precision.policy
    assert [str(one) for one in policy.modules] == words and policy.fp8 is not None
    assert Precision.of(policy).policy == policy
    assert policy.name == f"fp8_rowwise, {', '.join(words)}"
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert resolve(tmp_path / "run.toml").run == run.run
    (tmp_path / "short.toml").write_text('[precision]\ndtype = "bf16"\nmodules = ["*norm*:moments=bf16"]\n')
    assert resolve(tmp_path / "short.toml").run.precision.policy == by_name("bf16", "*norm*:moments=bf16")
    one = resolve(tmp_path / "short.toml", overrides=["--precision.modules", "head*:moments=int8"])
    assert one.run.precision.policy == by_name("bf16", "head*:moments=int8")
    none = resolve(tmp_path / "short.toml", overrides=["--precision.modules", "none"])
    assert none.run.precision.policy == RECIPES["bf16"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modules=embedding"], "not a pattern with a part and a dtype · precision.modules · found embedding"),
        (["modules=a:moment=fp32"], "found a:moment=fp32 / allowed NAMES:moments=DTYPE, NAMES:linears=DTYPE"),
        (["modules=:moments=fp32"], "found :moments=fp32"),
        (["dtype=bf16", "modules=*:moments=fp64"], "found *:moments=fp64 / allowed moments=fp32 or moments=bf16 or"),
        (["dtype=bf16", "modules=*:linears=fp8"], "found *:linears=fp8 / allowed linears=bf16"),
        (["dtype=fp8_rowwise", "modules=*:linears=fp32"], "allowed linears=bf16 or linears=fp8"),
    ],
    ids=str,
)
def test_words_that_say_nothing_or_what_no_role_may_be_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        resolve(overrides=[f"--precision.{w}" for w in words])
    assert said in str(error.value) and "fix" in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("bf16", ["embeding*:moments=int8"], "found embeding*:moments=int8 / allowed embedding.weight"),
        ("bf16", ["layers.7.*:moments=int8"], "fix: --precision.modules 'layers."),
        ("fp8_rowwise", ["*.attention.out.*:linears=bf16"], "allowed layers.*.attention.o.weight"),
        ("fp8_rowwise", ["head*:linears=bf16"], "no linear layer has such a name"),
        ("fp8_rowwise", ["*norm*:linears=bf16"], "no linear layer has such a name"),
        ("fp8_rowwise", ["layers*:linears=bf16"], "leaves no linear layer in FP8"),
    ],
    ids=str,
)
def test_patterns_that_match_nothing_are_refused_with_the_nearest(recipe: str, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        compile_step(EXPERTS, Layout(), 16, precision=by_name(recipe, *words))
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(BadInput):  # the fix of a question is one of the planner's own words
        question(EXPERTS, "8xH200", precision=recipe, modules=words)


def test_the_fix_of_a_refusal_is_a_pattern_that_matches() -> None:
    for word in ("embeding*:moments=int8", "layers.7.*:moments=int8", "layers.0.moe:moments=bf16", "x:moments=bf16"):
        with pytest.raises(BadInput) as error:
            check_modules(EXPERTS, by_name("bf16", word))
        check_modules(EXPERTS, by_name("bf16", error.value.fix.split("'")[1]))

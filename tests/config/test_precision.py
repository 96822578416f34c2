"""Recipes by name and by parts: what a run file resolves to, and what does not go together."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.policy import RECIPES, Policy, policy
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.run import Precision
from penteract.errors import BadInput
from penteract.readings.estimator import Estimator
from penteract.step.program import compile_step


def test_widths_are_those_of_the_dtypes() -> None:
    bf16 = RECIPES["bf16"].widths
    assert [bf16[r] for r in ("compute", "stat", "index", "host")] == [2, 4, 8, 0]
    assert [bf16[r] for r in ("parameter", "gradient", "reduce", "master", "moment")] == [2, 4, 4, 2, 4]
    assert replace(RECIPES["bf16"], master="fp32").widths["master"] == 4
    pure = RECIPES["bf16_pure"].widths
    assert [pure[r] for r in ("parameter", "gradient", "reduce", "master", "moment", "stat")] == [2, 2, 2, 0, 2, 4]
    assert replace(RECIPES["fp16"], moments="int8").widths["moment"] == 1


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_resolved_written_and_read_again(name: str, tmp_path: Path) -> None:
    run = resolve(overrides=["--precision.dtype", name])
    assert run.run.precision.policy == RECIPES[name] == policy(name) == Precision.of(RECIPES[name]).policy
    text = to_toml(run)
    assert tomllib.loads(text)["precision"] == {"dtype": name}  # the recipe stays the one that decides
    (tmp_path / "run.toml").write_text(text)
    assert resolve(tmp_path / "run.toml").run == run.run


def test_parts_of_a_recipe_are_changed() -> None:
    words = ["--precision.dtype=bf16", "--precision.master=none", "--precision.moments=int8", "--precision.reduce=bf16"]
    got = resolve(overrides=words).run.precision.policy
    assert got == replace(RECIPES["bf16"], master="", stochastic=True, moments="int8", reduce="bf16")
    assert got.name == "bf16_pure, gradient fp32, moments int8"
    narrow = resolve(overrides=["--precision.dtype=bf16", "--precision.gradient=bf16"]).run.precision.policy
    assert narrow.reduce == "bf16"  # auto: as gradients accumulate


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "bf16"])
def test_a_policy_without_master_weights_has_its_section(name: str) -> None:
    got = resolve(overrides=[f"--precision.dtype={name}", "--precision.master=none"]).run.precision.policy
    assert not got.master and Precision.of(got).policy == got
    assert Precision.of(got).dtype == {"bf16": "bf16_pure"}.get(name, name)


def test_no_section_has_fp8_beside_fp32() -> None:
    with pytest.raises(BadInput, match="recipes of FP8 compute in bf16"):
        Precision.of(replace(RECIPES["fp32"], fp8=Fp8(kind="rowwise")))


def test_parts_of_fp8_are_changed() -> None:
    words = ["dtype=fp8_delayed", "fp8_bf16_layers=[1, 2]", "fp8_gradient=e4m3", "fp8_history=4", "moments=bf16"]
    got = resolve(overrides=[f"--precision.{w}" for w in words]).run.precision.policy
    fp8 = Fp8(kind="delayed", gradient="e4m3", first=1, last=2, history=4)
    assert got == replace(RECIPES["bf16"], moments="bf16", fp8=fp8) == Precision.of(got).policy
    assert str(fp8) == "delayed, e4m3 and e4m3, first 1 and last 2 layers in bf16, scales of 4 steps"


def test_weights_are_gathered_in_fp8_where_asked() -> None:
    words = ["--precision.dtype=fp8_tensorwise", "--precision.fp8_gather=true", "--precision.fp8_bf16_layers=[1, 0]"]
    got = resolve(overrides=words).run.precision.policy
    assert got == replace(RECIPES["bf16"], fp8=Fp8(kind="tensorwise", first=1, gather=True)) == Precision.of(got).policy
    assert str(got.fp8) == "tensorwise, first 1 and last 0 layers in bf16, gathered in FP8"
    assert not any(p.fp8.gather for p in RECIPES.values() if p.fp8)
    assert got.name == "fp8_tensorwise, first 1 and last 0 layers in bf16, gathered in FP8"


def test_experts_in_fp8_are_asked_for() -> None:
    got = resolve(overrides=["--precision.dtype=fp8_blockwise", "--precision.fp8_experts=true"]).run.precision.policy
    assert got.fp8 == Fp8(kind="blockwise", gradient="e4m3", experts=True) and Precision.of(got).policy == got
    assert got.name == "fp8_blockwise, experts too"
    assert not any(p.fp8.experts for p in RECIPES.values() if p.fp8)


def test_rows_of_experts_in_fp8_are_not_padded() -> None:
    model = ModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=2, head_size=16, ffn_size=64, vocab_size=64,
                      moe=MoESpec(experts=4, top_k=1, ffn_size=32))  # fmt: skip
    layout = Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded", experts="grouped")
    for experts in (False, True):
        policy = replace(RECIPES["bf16"], fp8=Fp8(kind="rowwise", experts=experts))
        if not experts:
            compile_step(model, layout, 16, precision=policy)
            continue
        with pytest.raises(BadInput, match="found padded / allowed exact"):
            compile_step(model, layout, 16, precision=policy)


def test_fp16_has_no_blocks_that_rows_may_not_fit() -> None:
    """A plan refuses what a run does: an overflow of a block looks like one of the loss."""
    model = ModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=2, head_size=16, ffn_size=64, vocab_size=64,
                      moe=MoESpec(experts=4, top_k=1, ffn_size=32))  # fmt: skip
    gathered = Layout(dp=2, ep=2, ep_method="all_gather", expert_rows="padded", experts="quack")
    sent, planned = gathered.put(ep_method="all_to_all"), Estimator(model, cluster("2xH200"), 16, "fp16")
    compile_step(model, gathered, 16, precision="fp16")
    planned.check_sizes(gathered)
    for refuses in (lambda: compile_step(model, sent, 16, precision="fp16"), lambda: planned.check_sizes(sent)):
        with pytest.raises(BadInput, match="fp16 cannot have padded rows"):
            refuses()


def test_experts_in_fp8_take_whole_units_of_features_and_any_tokens() -> None:
    model = ModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=2, head_size=16, ffn_size=64, vocab_size=64,
                      moe=MoESpec(experts=4, top_k=1, ffn_size=32))  # fmt: skip
    by_rows, layout = RECIPES["fp8_rowwise"], Layout(tp=2, expert_tp=2)
    assert by_rows.fp8
    policy = replace(by_rows, fp8=replace(by_rows.fp8, experts=True))
    compile_step(model, layout, 16, precision=policy)
    with pytest.raises(BadInput) as error:
        compile_step(replace(model, moe=MoESpec(experts=4, top_k=1, ffn_size=48)), layout, 16, precision=policy)
    assert "layers.0.moe.experts.gate · found 24 features out / allowed multiples of 16" in str(error.value)
    assert "fix: --precision.fp8_experts false, or fewer ranks that cut it" in str(error.value)
    with pytest.raises(BadInput, match=r"no experts · precision.fp8_experts · found true / allowed false"):
        compile_step(replace(model, moe=None), Layout(), 16, precision=policy)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(dp=2, zero=2), "found zero = 2 / allowed zero = 3 · fix: --parallel.zero 3, or --precision.fp8_"),
        (Layout(tp=2, zero=3), "found dp·cp = 1 / allowed 2 or more · fix: --parallel.dp 2, or"),
        (Layout(dp=4, zero=3, shard_group=1), "found shard_group = 1 / allowed 0, or 2 or more · fix: --parallel.s"),
        (Layout(cp=2, zero=3), ""),
    ],
    ids=str,
)
def test_fp8_data_are_gathered_where_weights_are_cut(layout: Layout, said: str) -> None:
    policy = replace(RECIPES["bf16"], fp8=Fp8(kind="tensorwise", gather=True))
    small = ModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=2, head_size=16, ffn_size=64, vocab_size=64)
    for training in (True, False):
        try:
            compile_step(small, layout, 64, precision=policy, training=training)
        except BadInput as error:
            assert said in str(error) and said
        else:
            assert not said


def test_layers_in_fp8_are_those_between_the_ends() -> None:
    assert Fp8(kind="rowwise", first=1, last=2).bf16_layers(6, ahead=1) == (0, 4, 5, 6)
    assert Fp8(kind="rowwise", first=1).bf16_layers(3, ahead=2) == (0,)
    with pytest.raises(BadInput, match="fewer than the 3 layers"):
        Fp8(kind="rowwise", first=1, last=2).bf16_layers(3)


def test_sizes_that_are_no_whole_units_are_refused_by_name() -> None:
    small = ModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1, head_size=16, ffn_size=96, vocab_size=64)
    layout = Layout(tp=2, micro_batch_size=2)
    compile_step(replace(small, heads=4, kv_heads=2), layout, 32, precision="fp8_rowwise")
    with pytest.raises(BadInput) as error:
        compile_step(replace(small, head_size=24, heads=4), layout, 32, precision="fp8_rowwise")
    assert "layers.0.attention.k.weight · found 24 features out / allowed multiples of 16" in str(error.value)
    assert "--precision.dtype bf16" in str(error.value)
    with pytest.raises(BadInput) as error:
        compile_step(replace(small, heads=4, kv_heads=2), layout, 32, precision="fp8_blockwise")
    assert "multiples of 128" in str(error.value)
    assert "--precision.dtype fp8_tensorwise" in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dtype=fp16", "master=none"], "precision.master · found none / allowed fp32"),
        (["dtype=fp32", "master=fp32"], "precision.master · found fp32 / allowed none"),
        (["dtype=fp32", "gradient=bf16"], "precision.gradient · found bf16 / allowed fp32"),
        (["dtype=bf16_pure", "reduce=fp32"], "precision.reduce · found fp32 / allowed bf16"),
        (["dtype=bf16", "moments=fp64"], "precision.moments · found fp64 / allowed fp32, bf16, int8"),
        (["dtype=bf16", "loss_scale=8"], "precision.loss_scale · found 8 in bf16"),
        (["dtype=fp16", "loss_scale=0"], "precision.loss_scale · found 0 in fp16"),
        (["dtype=fp8"], "precision.dtype"),
        (["dtype=bf16", "fp8_block=64"], "precision.fp8_block · found 64 in bf16 / allowed none"),
        (["dtype=fp8_rowwise", "fp8_history=none"], "precision.fp8_history · found none in fp8_rowwise"),
        (["dtype=fp8_blockwise", "fp8_block=40"], "precision.fp8_block · found 40 / allowed multiples of 16"),
        (["dtype=fp8_rowwise", "fp8_gradient=e3m4"], "precision.fp8_gradient"),
        (["dtype=fp8_rowwise", "fp8_gather=true"], "precision.fp8_gather · found true in fp8_rowwise / allowed true"),
        (["dtype=bf16", "fp8_gather=true"], "precision.fp8_gather · found true in bf16 / allowed none"),
        (
            ["dtype=fp8_tensorwise", "fp8_experts=true"],
            "found true in fp8_tensorwise, whose scales depend on all tokens",
        ),
        (
            ["dtype=fp8_delayed", "fp8_experts=true"],
            "allowed true in fp8_rowwise and fp8_blockwise · fix: --",
        ),
        (
            ["dtype=fp8_blockwise", "fp8_fast_accumulation=true"],
            "precision.fp8_fast_accumulation · found true in fp8_blockwise",
        ),
        (["dtype=bf16", "fp8_experts=true"], "precision.fp8_experts · found true in bf16 / allowed none"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        resolve(overrides=[f"--precision.{w}" for w in words])
    assert said in str(error.value)


def test_policies_are_whole_or_refused() -> None:
    """Of all combinations, those that can be made have a name that tells them apart."""
    dtypes, made = ("fp64", "fp32", "bf16", "fp16"), list[Policy]()
    for c, g, r, m, o, s in product(dtypes, dtypes, dtypes, ("", "fp32"), (*dtypes, "int8"), (False, True)):
        scale = {"loss_scale": 1.0, "growth_every": 5} if c == "fp16" else {}
        try:
            made.append(
                Policy(compute=c, parameter=c, gradient=g, reduce=r, master=m, moments=o, stochastic=s, **scale)  # type: ignore[arg-type]
            )
        except BadInput as e:
            assert "allowed" in str(e) and "fix" in str(e)
    assert 40 < len(made) < 100
    assert len({p.name for p in made}) == len(made)

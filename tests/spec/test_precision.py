"""Recipes by name and by parts: what a run file resolves to, and what does not go together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from penteract.errors import BadInput
from penteract.spec.precision import RECIPES, Policy, policy
from penteract.spec.resolve import resolve
from penteract.spec.run import Precision
from penteract.spec.write import to_toml


def test_widths_are_those_of_the_dtypes() -> None:
    bf16 = RECIPES["bf16"].widths
    assert [bf16[r] for r in ("compute", "stat", "index", "host")] == [2, 4, 8, 0]
    assert [bf16[r] for r in ("parameter", "gradient", "reduce", "master", "moment")] == [2, 4, 4, 4, 4]
    pure = RECIPES["bf16_pure"].widths
    assert [pure[r] for r in ("parameter", "gradient", "reduce", "master", "moment", "stat")] == [2, 2, 2, 0, 2, 4]
    assert replace(RECIPES["fp16"], moments="int8").widths["moment"] == 1


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_resolved_written_and_read_again(name: str, tmp_path: Path) -> None:
    run = resolve(overrides=["--precision.dtype", name])
    assert run.run.precision.policy == RECIPES[name] == policy(name) == Precision.of(RECIPES[name]).policy
    text = to_toml(run)
    assert '"auto"' not in text[text.index("[precision]") : text.index("[output]")].replace('device = "auto"', "")
    (tmp_path / "run.toml").write_text(text)
    assert resolve(tmp_path / "run.toml").run == run.run


def test_parts_of_a_recipe_are_changed() -> None:
    words = ["--precision.dtype=bf16", "--precision.master=none", "--precision.moments=int8", "--precision.reduce=bf16"]
    got = resolve(overrides=words).run.precision.policy
    assert got == replace(RECIPES["bf16"], master="", stochastic=True, moments="int8", reduce="bf16")
    assert got.name == "bf16_pure, gradient fp32, moments int8"
    narrow = resolve(overrides=["--precision.dtype=bf16", "--precision.gradient=bf16"]).run.precision.policy
    assert narrow.reduce == "bf16"  # auto: as gradients accumulate


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

"""A size is its number to everyone, and its formula, read by another evaluator, gives that number and others."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formula import read
from penteract.config.layout import Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.ops.expression import LEGEND, Expression
from penteract.ops.symbols import Size, evaluate, expression_of, symbolic, values

NAMES = ("S", "D", "F", "cp", "tp")
Tree = Callable[[dict[str, int]], int]


def named(numbers: dict[str, int]) -> dict[str, Size]:
    return {name: Size.named(name, n) for name, n in numbers.items()}


def leaves() -> st.SearchStrategy[Tree]:
    sizes = st.sampled_from(NAMES).map(lambda name: lambda at: at[name])
    return sizes | st.integers(-3, 9).map(lambda n: lambda at: n)


def sums(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    def make(op: str, a: Tree, b: Tree) -> Tree:
        return {"+": lambda at: a(at) + b(at), "-": lambda at: a(at) - b(at), "·": lambda at: a(at) * b(at)}[op]

    return st.builds(make, st.sampled_from("+-·"), inner, inner)


def quotients(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    def make(op: str, a: Tree, b: Tree) -> Tree:
        def at(numbers: dict[str, int]) -> int:
            over = b(numbers)
            over = over if over else 7  # a branch, as programs have them
            return a(numbers) // over if op == "/" else a(numbers) % over if op == "%" else max(a(numbers), over)

        return at

    return st.builds(make, st.sampled_from("/%m"), inner, inner)


NUMBERS = st.fixed_dictionaries({name: st.integers(1, 12) for name in NAMES})


@given(st.recursive(leaves(), lambda inner: sums(inner) | quotients(inner), max_leaves=8), NUMBERS)
def test_a_size_is_its_number_and_so_is_its_formula(tree: Tree, numbers: dict[str, int]) -> None:
    plain, size = tree(numbers), tree(dict(named(numbers)))
    assert size == plain and hash(size) == hash(plain)
    e = expression_of(size)
    assert evaluate(e, numbers) == plain
    assert read(e.show(), numbers) == plain
    assert read(e.show(numbers)) == plain


@given(st.recursive(leaves(), sums, max_leaves=12), NUMBERS, NUMBERS)
def test_a_formula_without_branches_holds_at_other_numbers(
    tree: Tree, numbers: dict[str, int], others: dict[str, int]
) -> None:
    e = expression_of(tree(dict(named(numbers))))
    assert evaluate(e, others) == tree(others) == read(e.show(), others)


@given(NUMBERS)
def test_what_divides_by_rule_is_a_fraction_and_cancels(numbers: dict[str, int]) -> None:
    at = named(numbers | {"S": numbers["S"] * numbers["cp"] * numbers["tp"]})
    shard = at["S"] // at["cp"] // at["tp"]
    assert expression_of(shard).show() == "S/(cp·tp)"
    assert expression_of(shard * at["tp"] * at["cp"]) == Expression.symbol("S")
    assert expression_of(at["D"] * (at["S"] + at["F"]) // (at["S"] + at["F"])) == Expression.symbol("D")


def test_printing() -> None:
    s, d, f, b, cp, tp = (Size.named(n, v) for n, v in (("S", 64), ("D", 8), ("F", 24), ("B", 1), ("cp", 2), ("tp", 2)))
    shown = [
        (2 * b * s * d // (cp * tp), "2·B·S·D/(cp·tp)"),
        (s * s * d, "S²·D"),
        (sum([d, f, d]), "2·D + F"),
        (prod((f, 2 * d + f, 3)), "3·F·(2·D + F)"),
        (s - d, "S - D"),
        (-(-f // 7) * 7, "7·⌈F/7⌉"),
        (f // 7 + 1, "1 + ⌊F/7⌋"),
        (s % cp, "0"),
        ((f * d + 1) // (f + d + s), "⌊(1 + D·F)/(S + D + F)⌋"),
        (-s * d - f, "-(S·D + F)"),
        (min(d, f) // 2, "D/2"),
    ]
    for size, text in shown:
        assert expression_of(size).show() == text
    at = {"B": 1, "S": 64, "D": 8, "cp": 2, "tp": 2}
    assert expression_of(2 * b * s * d // (cp * tp)).show(at) == "2·1·64·8/(2·2)"
    assert expression_of(s * s).show(at) == "64²"


def test_a_formula_says_where_it_is_no_size() -> None:
    e = expression_of(Size.named("S", 8) // Size.named("cp", 2))
    with pytest.raises(ValueError, match=r"S/cp is 9/2"):
        evaluate(e, {"S": 9, "cp": 2})


def test_a_float_beside_a_size_is_a_float() -> None:
    c = Size.named("C", 64)
    assert (c**-0.5, 2.0 * c, c / 2, c * 0.5) == (0.125, 128.0, 32.0, 32.0)
    assert type(divmod(c, 3)[0]) is int and [*range(c)][-1] == 63 and list("ab")[Size(1)] == "b"


def test_every_name_has_a_meaning_and_a_number() -> None:
    m = ModelSpec(
        layers=2, hidden_size=32, heads=4, kv_heads=4, head_size=6, ffn_size=64, vocab_size=96,
        moe=MoESpec(experts=8, top_k=2, ffn_size=16, shared_ffn_size=24),
        latent=LatentSpec(kv_rank=9, query_rank=7, plain_size=4, rope_size=2, value_size=5),
    )  # fmt: skip
    layout = Layout(dp=3, tp=2, expert_tp=2, micro_batch_size=5, gradient_accumulation_steps=11)
    named_model, cut, length = symbolic(m, layout, 128)
    assert (named_model, cut, length) == (m, layout, 128)
    assert list(LEGEND) == sorted(values(m, layout, 128), key=list(LEGEND).index)
    assert expression_of(cut.expert_tp) == Expression.symbol("tp")
    assert named_model.moe is not None and expression_of(named_model.moe.ffn_size) == Expression.symbol("Fx")

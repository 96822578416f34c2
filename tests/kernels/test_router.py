"""Routing by products of 16-bit factors, without a GPU: its products replaced by their arithmetic, its kernels in
Triton's interpreter. Held to its declaration, and to routing in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.test_one_pass import let_go
from op_kernels.case import Case, x
from op_kernels.cases import CASES, of_all_ops
from op_kernels.expert_cases import ALL_EXPERTS
from op_kernels.test_wide_product import Aten, Told
from op_kernels.trial import check
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.kernel import Bindable, Env
from penteract.engine.kernels.moe.experts import choose_experts
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.triton.moe.router import choice, routers, splitting
from penteract.ops.declarations.declaration import CallShapes, Product
from penteract.ops.declarations.moe.narrow_router import PARTS, NarrowRouter
from penteract.ops.tape import Site

ABOUT = {"top_k": 3, "experts": 150, "score": "softmax", "normalize": True, "balance": "loss", "bias": ""}
MANY = Case("router", "many experts", (x(47, 1, 24),), ((150, 24),), ABOUT | ALL_EXPERTS)


def _in_groups() -> Iterator[Case]:
    """Of one token, many, and several sequences; groups that fill their places, and others."""
    for (score, balance), (groups, top), two, k, tokens, experts in (
        (("softmax", "loss"), (4, 2), True, 3, (1, 1), 32),
        (("sigmoid", "bias"), (8, 4), True, 6, (37, 3), 32),
        (("sigmoid", "none"), (16, 5), False, 5, (9, 2), 32),
        (("softmax", "none"), (2, 2), False, 32, (5, 1), 32),
        (("softmax", "loss"), (8, 3), False, 6, (19, 2), 160),
    ):
        attrs = ABOUT | {"top_k": k, "experts": experts, "score": score, "normalize": balance != "none",
                         "balance": balance, "bias": "steer" if balance == "bias" else "",
                         "scale": 2.5, "groups": groups,
                         "top_groups": top, "group_score": "top2" if two else "max"}  # fmt: skip
        what = f"{top} of {groups} groups of {experts} experts"
        yield Case("router", what, (x(*tokens, 8),), ((experts, 8),), attrs)


TRIED = [case for case in CASES if case.op_name == "router"] + [MANY, *_in_groups()]
NARROW = ("bf16", "bf16_pure", "fp16")


class _Counted(NarrowRouter):
    """What torch counts: the products of all parts."""

    def flops(self, phase: str, *about: Any) -> int:
        return super().flops(phase, *about) * (1 if phase == "forward" else PARTS)


@pytest.mark.parametrize(("case", "precision"), of_all_ops(TRIED, *NARROW, "fp32", "fp64"), ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str) -> None:
    declared = _Counted() if precision in NARROW else NarrowRouter()
    assert check(case, precision, declared, let_go(routers(Aten())["router"])) == []


def test_parts_of_a_number_are_all_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 60, (70, 150), generator=generator)
    numbers = torch.ldexp(torch.randn(70, 150, generator=generator), exponents)
    parts = splitting(numbers, torch.bfloat16)().view(70, PARTS, 150)
    assert torch.equal(parts.double().sum(1), numbers.double())
    small = torch.randn(70, 150, generator=generator)
    found = splitting(small, torch.float16)().view(70, PARTS, 150).double().sum(1)
    assert (found - small.double()).abs().max() <= 2.0**-25


def test_statistics_are_those_of_fp32() -> None:
    """Of the same 16-bit numbers: logits and gradients to the rounding of a sum."""
    tokens, width, experts, k = 96, 256, 40, 4
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    env = Env(Mesh(Layout()), 0, torch.float32)
    site = Site("router", (), (), attrs=ABOUT | ALL_EXPERTS | {"top_k": k, "experts": experts})
    h, w, g = drawn(tokens, 1, width), drawn(experts, width) / 16, drawn(tokens, 1, k)
    g_scores = drawn(tokens, 1, experts, dtype=torch.float32)
    found = list[list[torch.Tensor]]()
    for kernel in (routers(Aten())["router"], REFERENCE["router"]):
        outs = [
            torch.empty(tokens, 1, k, dtype=torch.bfloat16), torch.empty(tokens, 1, k, dtype=torch.int64),
            torch.empty(tokens, 1, experts), torch.empty(1, experts, dtype=torch.int64),
        ]  # fmt: skip
        kernel.forward(env, site, [h], [w], outs)
        made = [torch.empty_like(h), torch.empty(tokens, 1, experts)]
        assert kernel.input_gradient is not None
        assert kernel.weight_gradient is not None
        kernel.input_gradient(env, site, [outs[1], outs[2], g, g_scores], [w], made)
        into = torch.empty(experts, width)
        kernel.weight_gradient(env, site, [h, made[1]], [into], False)
        found.append([outs[2], made[1], into, made[0].float(), outs[1]])
    (*some, rounded, chosen), (*same, also_rounded, also_chosen) = found
    assert torch.equal(chosen, also_chosen)
    for got, want in zip(some, same, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    torch.testing.assert_close(rounded, also_rounded, rtol=2.0**-7, atol=1e-5)


def _chosen(logits: torch.Tensor, **about: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the kernel and plain torch choose of logits [s, B, X]."""
    s, b, experts = logits.shape
    attrs = ABOUT | ALL_EXPERTS | {"experts": experts} | about
    env = Env(Mesh(Layout()), 0, torch.float32)
    env.biases["steer"] = torch.linspace(-1, 1, experts)
    k, found = attrs["top_k"], list[list[torch.Tensor]]()
    for choose in (Bindable(choice), choose_experts):
        outs = [
            torch.empty(s, b, k), torch.empty(s, b, k, dtype=torch.int64), logits.clone(),
            torch.empty(b, experts, dtype=torch.int64),
        ]  # fmt: skip
        choose(env, Site("router", (), (), attrs=attrs), outs)
        found.append(outs)
    return found[0], found[1]


@pytest.mark.parametrize("groups", [1, 4])
def test_of_equal_scores_the_first_is_chosen_once(groups: int) -> None:
    about = {"top_k": 5, "groups": groups, "top_groups": max(1, groups // 2), "group_score": "top2"}
    (weights, index, _, choices), _ = _chosen(torch.zeros(7, 2, 16), **about)
    assert torch.equal(index, torch.arange(5).expand(7, 2, 5))
    assert torch.equal(choices, torch.cat([torch.full((2, 5), 7), torch.zeros(2, 11, dtype=torch.int64)], 1))
    torch.testing.assert_close(weights, torch.full((7, 2, 5), 0.2))


def test_negative_ranks_are_in_order_too() -> None:
    """A bias makes most of them negative."""
    logits = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(2)) - 4
    some, same = _chosen(logits, score="sigmoid", balance="bias", bias="steer", top_k=40)
    assert (some[2] + torch.linspace(-1, 1, 64) < 0).any()
    for got, want in zip(some, same, strict=True):
        torch.testing.assert_close(got, want)


def test_nan_of_either_sign_is_chosen_before_numbers() -> None:
    """As torch does; one of them is what processors make of infinities."""
    scores = torch.zeros(1, 1, 24)
    scores[0, 0, [5, 17, 23]] = torch.tensor([0x7FC00000, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    assert scores.isnan().sum() == 3
    _, index, _, choices = _chosen(scores, top_k=4, score="sigmoid", normalize=False)[0]
    assert index.flatten().tolist() == [5, 17, 23, 0] and choices.sum() == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_experts_exist_and_differ_where_scores_are_not_finite(bad: float) -> None:
    """Elsewhere a token's copies would be written outside of their tensors."""
    logits = torch.zeros(3, 1, 24)
    logits[1, 0, :9] = bad
    _, index, _, choices = _chosen(logits, top_k=6)[0]
    assert all(len(set(row)) == 6 and max(row) < 24 for row in index[:, 0].tolist())
    assert choices.sum() == 18


@pytest.mark.parametrize(
    ("phase", "product"),
    [("forward", (1, 64, 8, 16)), ("input_gradient", (1, 64, 16, 24)), ("weight_gradient", (1, 24, 16, 64))],
)
def test_its_time_is_that_of_all_parts(phase: str, product: tuple[int, ...]) -> None:
    told: Any = Told()
    call = CallShapes(phase, [(64, 1, 16)], [(8, 16)], ABOUT | ALL_EXPERTS | {"experts": 8})
    NarrowRouter().cost(told, call, RECIPES["bf16"].widths, list)
    assert told.asked == [Product(*product)]


@pytest.mark.parametrize(
    ("precision", "phase", "moved"),
    [
        # 64 tokens of two sequences, 8 experts, 3 a token, width 16: choices cleared and counted, logits and scores
        ("bf16", "forward", [2 * 8 * 8, 64 * (2 * 8 * 4 + 3 * (2 + 8)) + 2 * 2 * 8 * 8]),
        ("fp32", "forward", [2 * 8 * 8, 64 * (2 * 8 * 4 + 3 * (4 + 8)) + 2 * 2 * 8 * 8]),
        # scores, their gradient and that of logits, three parts; a table read, and written three times
        ("bf16", "input_gradient", [64 * (3 * 8 * 4 + 3 * (2 + 8) + 3 * 8 * 2), 4 * 8 * 16 * 2]),
        ("fp32", "input_gradient", [64 * (3 * 8 * 4 + 3 * (4 + 8))]),
        # the gradient of logits and its parts; two sums of tables, and one that is added to the bucket
        ("bf16", "weight_gradient", [64 * (8 * 4 + 3 * 8 * 2), *[3 * 8 * 16 * 4] * 3]),
        ("fp32", "weight_gradient", None),
        ("fp64", "forward", None),
    ],
)
def test_what_it_moves_beside_products(precision: str, phase: str, moved: list[int] | None) -> None:
    about = ABOUT | ALL_EXPERTS | {"experts": 8}
    kernels = NarrowRouter().traffic(phase, [(32, 2, 16)], [(8, 16)], about, RECIPES[precision].widths)
    assert (kernels and [kernel.moved for kernel in kernels]) == moved


def test_its_price_is_that_of_products_and_of_what_it_moves() -> None:
    """A second each for a product and for each kernel."""
    rates: Any = Told()
    rates.product, rates.moved = lambda product: 1.0, lambda amount, walked=0: 1.0
    for precision, phase, seconds in (
        ("bf16", "forward", 3.0),
        ("bf16", "weight_gradient", 5.0),
        ("fp32", "forward", 3.0),
    ):
        call = CallShapes(phase, [(32, 2, 16)], [(8, 16)], ABOUT | ALL_EXPERTS | {"experts": 8})
        assert NarrowRouter().cost(rates, call, RECIPES[precision].widths, list)[1] == seconds


def test_a_bound_choice_reads_what_is_there_when_it_is_called() -> None:
    """Counts begin at 0 each time, and the bias is that of the moment."""
    attrs = ABOUT | ALL_EXPERTS | {"experts": 8, "bias": "steer"}
    env = Env(Mesh(Layout()), 0, torch.float32)
    logits, k = torch.randn(5, 2, 8), attrs["top_k"]
    outs = [
        torch.empty(5, 2, k), torch.empty(5, 2, k, dtype=torch.int64), logits.clone(),
        torch.empty(2, 8, dtype=torch.int64),
    ]  # fmt: skip
    call = choice(env, Site("router", (), (), attrs=attrs), outs)
    for first in (0, 7, 0):
        env.biases["steer"] = torch.zeros(8).index_fill_(0, torch.tensor(first), 9.0)
        outs[2].copy_(logits)
        call()
        assert (outs[1][..., 0] == first).all() and outs[3].sum() == 5 * 2 * k

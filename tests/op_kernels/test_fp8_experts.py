"""Experts' matrices in FP8 on a CPU: products against data by hand, whom a token meets, declared bytes and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from op_kernels.fp8 import rounded
from op_kernels.test_fp8 import unseen
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Fp8, usual
from penteract.config.precision.policy import RECIPES
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import dtype_of
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.moe import experts as plain
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.quantised.fp8 import emulated
from penteract.engine.kernels.quantised.fp8_experts import FOUR, in_fours, scaled_experts
from penteract.engine.kernels.quantised.quantise import Operand
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import kernels_by_call
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.moe.experts import ExpertLinear
from penteract.ops.declarations.quantised import fp8 as declared
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

D, F = 48, 32  # features in and out
UNEVEN = (5, 0, 3, 1, 0)  # rows of each expert
EVEN = (3, 3, 2)  # as even as they can be
PHASES = ("forward", "input_gradient", "weight_gradient")
RECIPE = {
    "rowwise": usual("rowwise"),
    "rowwise, powers of two": replace(usual("rowwise"), powers=True),
    "blockwise": replace(usual("blockwise"), block=16),
    "blockwise, gradients in e5m2": replace(usual("blockwise"), block=16, gradient="e5m2"),
}
RECIPE = {name: replace(fp8, experts=True) for name, fp8 in RECIPE.items()}


class Trial:
    """Matrices of experts, rows for them, of values far apart, and the three phases."""

    def __init__(
        self, fp8: Fp8, rows: tuple[int, ...], precision: str = "fp32", *, product: Any = emulated, multiple: int = 1
    ) -> None:
        generator, dtype = torch.Generator().manual_seed(7), dtype_of("compute", precision)

        def draw(*shape: int) -> torch.Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return x.mul_(torch.exp(2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64))).to(dtype)

        self.fp8, self.rows, n = fp8, rows, sum(rows)
        self.w, self.x, self.g = draw(len(rows), F, D), draw(n, D), draw(n, F).mul_(1e-4)
        shapes = (tuple(self.w.shape),)
        attrs = {"fp8": fp8, "cut": None}
        self.site = Site("expert_linear", (Spec((n, D)), Spec((), "host")), (Spec((n, F)),), ("w",), shapes, attrs)
        self.env = Env(Mesh(Layout()), 0, dtype_of("stat", precision))
        self.kernel = scaled_experts(product, multiple=multiple)
        self.y, self.dx = torch.empty(n, F, dtype=dtype), torch.empty(n, D, dtype=dtype)
        self.dw = torch.full((len(rows), F, D), 3.0, dtype=dtype_of("gradient", precision))

    @property
    def ins(self) -> list[tuple[int, ...]]:
        return [(sum(self.rows), D), ()]

    def phases(self) -> dict[str, Callable[[], None]]:
        kernel, env, site, splits = self.kernel, self.env, self.site, Splits([], [], [list(self.rows)])
        assert kernel.input_gradient is not None and kernel.weight_gradient is not None
        return {
            "forward": lambda: kernel.forward(env, site, [self.x, splits], [self.w], [self.y]),
            "input_gradient": lambda: kernel.input_gradient(env, site, [splits, self.g], [self.w], [self.dx]),  # type: ignore[misc]
            "weight_gradient": lambda: kernel.weight_gradient(env, site, [self.x, splits, self.g], [self.dw], False),  # type: ignore[misc]
        }

    def run(self) -> Trial:
        for phase in self.phases().values():
            phase()
        return self

    def by_expert(self, t: torch.Tensor) -> list[torch.Tensor]:
        return list(t.double().split(list(self.rows)))


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPE)
def test_products_are_those_of_the_fp8_data(name: str) -> None:
    fp8 = RECIPE[name]
    trial = Trial(fp8, UNEVEN).run()
    got = zip(*map(trial.by_expert, (trial.x, trial.g, trial.y, trial.dx)), trial.w.double(), strict=True)
    for x, g, y, dx, w in got:
        if not len(x):
            continue
        forward = rounded(x, fp8, "e4m3") @ rounded(w, fp8, "e4m3", square=True).t()
        back = rounded(g, fp8, fp8.gradient) @ rounded(w.t(), fp8, "e4m3", square=True).t()
        for found, wanted in ((y, forward), (dx, back)):
            error = (found - wanted).abs().max() / wanted.abs().max()
            assert error < 2e-6, error.item()  # sums of so few numbers in fp32


@pytest.mark.parametrize("name", RECIPE)
def test_gradients_of_weights_are_not_in_fp8(name: str) -> None:
    trial = Trial(RECIPE[name], UNEVEN, "bf16").run()
    wanted = torch.full_like(trial.dw, 5.0)
    splits = Splits([], [], [list(UNEVEN)])
    plain.expert_linear_weight(trial.env, trial.site, [trial.x, splits, trial.g], [wanted], False)
    assert torch.equal(trial.dw, wanted)
    assert not trial.dw[1].any()  # without rows


@pytest.mark.parametrize("name", RECIPE)
@pytest.mark.parametrize("own", [(2, 0, 0, 1, 0), (1, 0, 3, 0, 0)])
def test_a_token_has_the_same_whomever_it_meets(name: str, own: tuple[int, ...]) -> None:
    """In fp64 beside the data: only the order of sums is left, and a scale of other tokens shows."""
    every, part = Trial(RECIPE[name], UNEVEN, "fp64").run(), Trial(RECIPE[name], own, "fp64")

    def some(t: torch.Tensor) -> torch.Tensor:
        """The first rows of each expert, so many as it has here."""
        return torch.cat([rows[:n] for rows, n in zip(every.by_expert(t), own, strict=True)])

    part.x, part.g, part.w = some(every.x), some(every.g), every.w
    part.run()
    for found, wanted in ((part.y, some(every.y)), (part.dx, some(every.dx))):
        assert (found - wanted).abs().max() < 1e-13 * wanted.abs().max()


def test_no_rows_at_all_ask_for_nothing() -> None:
    trial = Trial(RECIPE["rowwise"], (0, 0)).run()
    trial.site = replace(trial.site, attrs={**trial.site.attrs, "cut": 1})
    trial.env.all_reduce_max = lambda axis, x: pytest.fail("asked")
    trial.run()
    assert not trial.dw.any()


@pytest.mark.parametrize("rows", [UNEVEN, (4, 8), (0, 2), (1, 1, 1), (9,)])
@pytest.mark.parametrize("name", RECIPE)
def test_rows_in_fours_are_the_same(name: str, rows: tuple[int, ...]) -> None:
    """As kernels want blocks: a product never sees another number of rows, and what it writes too far is lost."""
    seen: list[int] = []

    def product(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
        seen.append(len(out))
        assert a.scale.is_contiguous() and len(a.data) == len(out)
        emulated(fp8, a, b, out, forward)

    plainly = Trial(RECIPE[name], rows).run()
    fours = Trial(RECIPE[name], rows, product=in_fours(product), multiple=FOUR).run()
    for found, wanted in ((fours.y, plainly.y), (fours.dx, plainly.dx)):
        assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert RECIPE[name].kind != "blockwise" or not any(n % FOUR for n in seen)


# ---- declarations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2**22, 100, 16 * 32])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("rows", [EVEN, (2,), (1, 1, 0, 0)])
@pytest.mark.parametrize("kind", ["rowwise", "blockwise"])
def test_workspace_is_what_is_declared(
    kind: str, rows: tuple[int, ...], precision: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(RECIPE[kind], rows, precision, product=unseen)
    kernel = declaration_of(trial.site, Layout())
    monkeypatch.setattr(declared, "CHUNK", chunk)
    for phase, call in trial.phases().items():
        with Storages() as storages:
            call()
        about = (phase, trial.ins, trial.site.weights, trial.site.attrs)
        assert storages.peak == kernel.workspace(*about, RECIPES[precision].widths), phase  # type: ignore[arg-type]
        assert storages.now == 0


@pytest.mark.parametrize("kind", ["rowwise", "blockwise"])
def test_work_and_what_is_kept_are_those_of_the_word(kind: str) -> None:
    trial = Trial(RECIPE[kind], UNEVEN)
    kernel, op_name = declaration_of(trial.site, Layout()), ExpertLinear()
    assert (kernel.input_keeps, kernel.weight_keeps) == (op_name.input_keeps, op_name.weight_keeps)
    assert [kernel.in_fp8(phase) for phase in PHASES] == [True, True, False]
    for phase, call in trial.phases().items():
        with FlopCounterMode(display=False) as flops:
            call()
        about = (phase, trial.ins, trial.site.weights, trial.site.attrs)
        assert flops.get_total_flops() == kernel.flops(*about) == op_name.flops(*about)


@pytest.mark.parametrize("kind", ["rowwise", "blockwise"])
@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN])
def test_ranks_are_asked_for_what_is_declared(kind: str, cut: int | None, rows: tuple[int, ...]) -> None:
    trial, asked = Trial(RECIPE[kind], rows), list[tuple[str, int]]()
    trial.site = replace(trial.site, attrs={**trial.site.attrs, "cut": cut})
    kernel = declaration_of(trial.site, Layout())
    trial.env.all_reduce_max = lambda axis, x: asked.append((axis, x.numel()))
    found = set[str]()
    for phase, call in trial.phases().items():
        asked.clear()
        call()
        axis, n = kernel.all_reduced_max(phase, trial.ins, trial.site.weights, trial.site.attrs)
        assert asked == ([(axis, n)] if axis else [])
        found |= {phase} if axis else set()
    assert found == ({{1: "forward", 0: "input_gradient"}[cut]} if kind == "rowwise" and cut is not None else set())


@pytest.mark.parametrize(
    ("kind", "elementwise", "looks"),
    [("rowwise", "reference", 2), ("rowwise", "triton", 2), ("blockwise", "reference", 2), ("blockwise", "triton", 1)],
)
def test_passes_are_of_rows_and_of_matrices_that_have_some(kind: str, elementwise: Any, looks: int) -> None:
    trial = Trial(RECIPE[kind], EVEN)
    kernel, widths = declaration_of(trial.site, Layout(elementwise=elementwise)), RECIPES["bf16"].widths
    for phase, k, n in (("forward", D, F), ("input_gradient", F, D)):
        rows = sum(EVEN) + len(EVEN) * n
        assert kernel.passes(phase, trial.ins, trial.site.weights, widths) == rows * k * (2 * looks + 1)
    assert kernel.passes("weight_gradient", trial.ins, trial.site.weights, widths) == 0


def test_without_a_recipe_they_are_not_in_fp8() -> None:
    trial = Trial(RECIPE["rowwise"], UNEVEN)
    bare, splits = replace(trial.site, attrs={}), Splits([], [], [list(UNEVEN)])
    assert type(declaration_of(bare, Layout())) is ExpertLinear
    REFERENCE["expert_linear"].forward(trial.env, bare, [trial.x, splits], [trial.w], [trial.y])
    exact = torch.cat([x @ w.double().t() for x, w in zip(trial.by_expert(trial.x), trial.w, strict=True)])
    torch.testing.assert_close(trial.y.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    REFERENCE["expert_linear"].forward(trial.env, trial.site, [trial.x, splits], [trial.w], [trial.y])
    assert torch.equal(trial.y, Trial(RECIPE["rowwise"], UNEVEN).run().y)


# ---- as a GPU wants it -------------------------------------------------------------------------------------------


def _as_cublas(
    a: torch.Tensor, b: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor, **_: Any
) -> None:
    """What cuBLASLt multiplies, held to what it takes; a [m, k], b [k, n]."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous() and b.t().is_contiguous() and out.shape == (m, n) and not k % 16 and not n % 16
    assert not any(t.data_ptr() % 16 for t in (a, b, first, second, out))
    if first.shape[1] == 1:
        assert first.shape == (m, 1) and second.shape == (1, n)
    else:
        assert not m % 4 and first.stride()[0] == 1 and (k == 128 or first.stride()[1] == m)
        assert second.shape == (k // 128, n // 128 if k % 512 == 0 else n)
        first, second = first.repeat_interleave(128, 1), second.repeat_interleave(128, 0)
        second = second if second.shape[1] == n else second.repeat_interleave(128, 1)
    out.copy_((a.float() * first) @ (b.float() * second))


@pytest.mark.parametrize("rows", [UNEVEN, (2, 1, 0, 4, 6), (1, 0, 0, 0, 0), (5, 5, 6, 5, 0)])
@pytest.mark.parametrize("kind", ["rowwise", "blockwise"])
def test_a_gpu_gets_what_its_products_take(monkeypatch: pytest.MonkeyPatch, kind: str, rows: tuple[int, ...]) -> None:
    calls: list[int] = []

    def multiply(a: torch.Tensor, *about: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
        calls.append(len(a))
        _as_cublas(a, *about, out=out, **more)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    fp8, (wide, narrow) = replace(usual(kind), experts=True), (512, 128)  # type: ignore[arg-type]
    bodies_of = {"gpu": kernels_by_call(Layout(), torch.device("cuda")), "cpu": REFERENCE}
    generator, made = torch.Generator().manual_seed(3), dict[str, list[torch.Tensor]]()
    x, g = (torch.randn(sum(rows), n, generator=generator) for n in (wide, narrow))
    w, splits = torch.randn(len(rows), narrow, wide, generator=generator), Splits([], [], [list(rows)])
    site = Site("expert_linear", (), (), ("w",), (tuple(w.shape),), {"fp8": fp8, "cut": None})
    env = Env(Mesh(Layout()), 0, torch.float32)
    for where, op_names in bodies_of.items():
        y, dx = torch.full_like(g, torch.nan), torch.full_like(x, torch.nan)
        op_names["expert_linear"].forward(env, site, [x, splits], [w], [y])
        op_names["expert_linear"].input_gradient(env, site, [splits, g], [w], [dx])  # type: ignore[misc]
        made[where] = [y, dx]
    assert len(calls) <= 2 * (sum(n > 0 for n in rows) + 1)  # one for each expert, and in each phase one for the end
    for gpu, cpu in zip(*made.values(), strict=True):
        assert (gpu - cpu).abs().max() < 1e-5 * cpu.abs().max()

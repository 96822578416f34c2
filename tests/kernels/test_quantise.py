"""FP8 data and scales by kernels against those of plain torch: the same bits."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from op_kernels.test_fp8 import unseen
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import KINDS, LARGEST, Fp8, usual
from penteract.config.precision.policy import RECIPES
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.moe.experts import Splits
from penteract.engine.kernels.quantised.fp8 import emulated, scaled
from penteract.engine.kernels.quantised.fp8_experts import scaled_experts
from penteract.engine.kernels.quantised.quantise import TORCH, Operand, OperandView, Quantiser, scale_count
from penteract.engine.kernels.triton.quantised.quantise import TRITON
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import quantise_workspace
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

RECIPE = {
    **{kind: replace(usual(kind), block=32) for kind in KINDS},
    "tensorwise, powers of two": replace(usual("tensorwise"), powers=True),
    "blockwise, powers of two": replace(usual("blockwise"), block=32, powers=True),
}
SHAPE = 96, 160  # not whole tiles, either way round


def drawn(rows: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values far apart, with zeros among them, and a row and a block of zeros alone."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator) * torch.exp(4 * torch.randn(k, generator=generator))
    x[:, ::7] = 0
    x[3] = 0
    x[:32, 32:64] = 0
    return x.to(dtype)


def made(how: Quantiser, fp8: Fp8, view: OperandView) -> Operand:
    scale = torch.zeros(scale_count(fp8, view))
    how.put_largest(fp8, view, scale)
    return how.quantised(fp8, view, scale)


def same(a: Operand, b: Operand) -> bool:
    return a.scale.shape == b.scale.shape and all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("name", RECIPE)
def test_data_and_scales_are_those_of_torch(name: str, transposed: bool) -> None:
    fp8 = RECIPE[name]
    for square, format_ in ((False, fp8.operand), (True, fp8.operand), (False, "e5m2")):
        x = drawn(*SHAPE)
        view = OperandView(0, x.t() if transposed else x, format_, square)  # type: ignore[arg-type]
        assert same(made(TRITON, fp8, view), made(TORCH, fp8, view)), (square, format_)


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize("name", RECIPE)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e-30])
def test_what_is_no_number_is_told_alike(name: str, odd: float) -> None:
    """Where one scale is NaN or infinite, so are the data that share it, and no others."""
    x = drawn(*SHAPE, dtype=torch.float32)
    x[5, 40] = odd
    fp8 = RECIPE[name]
    view = OperandView(0, x, fp8.operand)
    for kernel, torchs in zip(made(TRITON, fp8, view), made(TORCH, fp8, view), strict=True):
        assert torch.equal(kernel.float().nan_to_num(7.0), torchs.float().nan_to_num(7.0))


@pytest.mark.parametrize("format_", ["e4m3", "e5m2"])
def test_numbers_that_share_a_scale_are_divided_alike(format_: Any) -> None:
    x, data = drawn(*SHAPE).view(-1)[5:], [torch.empty(0), torch.empty(0)]
    scale = x.abs().max().float().view(1) / LARGEST[format_]
    for i, how in enumerate((TORCH, TRITON)):
        data[i] = torch.empty(len(x), dtype=FORMATS[format_])
        with Storages() as seen:
            how.quantise_into(
                format_, x, scale, data[i], torch.empty(quantise_workspace(1000, how.elementwise) // FLOAT)
            )
        assert seen.peak == quantise_workspace(1000, how.elementwise)
    assert torch.equal(*(c.view(torch.uint8) for c in data))


@pytest.mark.parametrize("name", KINDS)
def test_a_linear_is_the_same_and_allocates_what_is_declared(name: str) -> None:
    fp8 = RECIPE[name]
    results = [_linear(fp8, how, kernels) for how, kernels in ((TORCH, "reference"), (TRITON, "triton"))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _linear(fp8: Fp8, how: Quantiser, kernels: Any) -> list[torch.Tensor]:
    t, (f, d) = 64, SHAPE
    x, w, g = drawn(t, d).view(t, 1, d), drawn(f, d), drawn(t, f).view(t, 1, f)
    site = Site("linear", (Spec((t, 1, d)),), (Spec((t, 1, f)),), ("w",), ((f, d),), {"fp8": fp8, "cut": None})
    env = Env(Mesh(Layout()), 0, torch.float32)
    env.past_amax, env.amax = ({"w": torch.zeros(3)} for _ in range(2))
    kernel, declared = scaled(emulated, how), declaration_of(site, Layout(elementwise=kernels))
    bare = scaled(_no_product, how)
    outs = [torch.empty_like(g), torch.empty_like(x), torch.empty(f, d)]
    about = ([(t, 1, d)], site.weights, site.attrs, RECIPES["bf16"].widths)
    for one in (bare, kernel):
        runs = {
            "forward": lambda one=one: one.forward(env, site, [x], [w], [outs[0]]),
            "input_gradient": lambda one=one: one.input_gradient(env, site, [g], [w], [outs[1]]),  # type: ignore[misc]
            "weight_gradient": lambda one=one: one.weight_gradient(env, site, [x, g], [outs[2]], False),  # type: ignore[misc]
        }
        for phase, run in runs.items():
            with Storages() as seen:
                run()
            if one is bare:
                few = 64  # scalars
                assert abs(seen.peak - declared.workspace(phase, *about)) <= few, (phase, kernels)
    return outs


def _no_product(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
    """Nothing beside what is declared: emulated products widen data."""
    out.zero_()


@pytest.mark.parametrize("name", ["rowwise", "blockwise, powers of two"])
def test_experts_are_the_same_and_allocate_what_is_declared(name: str) -> None:
    results = [_experts(RECIPE[name], how, kernels) for how, kernels in ((TORCH, "reference"), (TRITON, "triton"))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _let_go(how: Quantiser) -> Callable[[Fp8, OperandView, torch.Tensor], Operand]:
    """`quantised`, after what interpreted kernels hold of the call before is let go."""

    def quantised(fp8: Fp8, view: OperandView, largest: torch.Tensor) -> Operand:
        gc.collect()
        return how.quantised(fp8, view, largest)

    return quantised


def _experts(fp8: Fp8, how: Quantiser, kernels: Any) -> list[torch.Tensor]:
    """Rows as even as they can be, and in no whole blocks."""
    rows, f, d = [4, 3], 64, 96
    t, splits = sum(rows), Splits([], [], [rows])
    x, g, w = drawn(t, d), drawn(t, f), torch.stack([drawn(f, d), drawn(d, f).t()])
    specs = (Spec((t, d)), Spec((), "host")), (Spec((t, f)),)
    site = Site("expert_linear", *specs, ("w",), (tuple(w.shape),), {"fp8": fp8, "cut": None})
    env, outs = Env(Mesh(Layout()), 0, torch.float32), [torch.empty_like(g), torch.empty_like(x)]
    declared, about = declaration_of(site, Layout(elementwise=kernels)), ([(t, d), ()], site.weights, site.attrs)
    one = scaled_experts(unseen, how._replace(quantised=_let_go(how)))
    assert one.input_gradient is not None
    for phase, run, ins in (("forward", one.forward, [x, splits]), ("input_gradient", one.input_gradient, [splits, g])):
        with Storages() as seen:
            run(env, site, ins, [w], [outs[phase != "forward"]])
        assert seen.peak == declared.workspace(phase, *about, RECIPES["bf16"].widths), (phase, kernels)
    return outs

"""Linears in FP8 on a CPU: data and scales against tables written by hand, products against fp64, declared bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from op_kernels.fp8 import nearest, rounded, values
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import KINDS, LARGEST, Fp8, usual
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.device.storages import Storages
from penteract.engine.dtypes import FORMATS, dtype_of
from penteract.engine.kernels.checks import _check_fp8
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.quantised import fp8 as engine
from penteract.engine.kernels.quantised import quantise
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import TargetHere
from penteract.errors import BadInput
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.dense import Linear
from penteract.ops.declarations.quantised import fp8 as declared
from penteract.ops.spec import Spec
from penteract.ops.tape import Site

T, D, F = (8, 4), 48, 64  # tokens and sequences, features in and out
RECIPE = {k: replace(usual(k), block=16) for k in KINDS}
EXTRA = {
    "tensorwise, powers of two": replace(RECIPE["tensorwise"], powers=True),
    "blockwise, powers of two": replace(RECIPE["blockwise"], powers=True),
    "rowwise, e4m3 alone": replace(RECIPE["rowwise"], gradient="e4m3"),
    "tensorwise, gathered": replace(RECIPE["tensorwise"], gather=True),
}
ALL = {**RECIPE, **EXTRA}
DECLARED = [*KINDS, "tensorwise, gathered"]  # that differ in what they declare
# Half a step of a number between two powers of two, relative to the number; scaled sums are rounded in fp32.
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}


class Trial:
    """A linear's tensors, of values far apart, and its three phases."""

    def __init__(
        self, fp8: Fp8, precision: str = "fp32", *, bias: bool = False, product: Any = engine.emulated
    ) -> None:
        generator, dtype = torch.Generator().manual_seed(5), dtype_of("compute", precision)

        def draw(*shape: int) -> torch.Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return x.mul_(torch.exp(2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64))).to(dtype)

        self.x, self.w, self.g = draw(*T, D), draw(F, D), draw(*T, F).mul_(1e-4)
        self.b = [draw(F)] if bias else []
        shapes = (tuple(self.w.shape), *(tuple(b.shape) for b in self.b))
        specs = (Spec((*T, D)),), (Spec((*T, F)),)
        self.site = Site("linear", *specs, ("w", "b")[: len(shapes)], shapes, {"fp8": fp8, "cut": None})
        self.env = Env(Mesh(Layout()), 0, dtype_of("stat", precision))
        self.env.past_amax, self.env.amax = ({"w": torch.zeros(3)} for _ in range(2))
        self.read = self.w
        if fp8.gather:  # what products read came in FP8
            view, largest = quantise.OperandView(1, self.w, "e4m3"), self.w.abs().max().float().view(1)
            self.read, self.env.scales["w"] = quantise.quantised(fp8, view, largest)
        self.kernel, self.precision = engine.scaled(product), precision
        self.y, self.dx = torch.empty(*T, F, dtype=dtype), torch.empty(*T, D, dtype=dtype)
        self.dw = [torch.full(s, 3.0, dtype=dtype_of("gradient", precision)) for s in shapes]

    def phases(self) -> dict[str, Callable[[], None]]:
        kernel, env, site, weights = self.kernel, self.env, self.site, [self.read, *self.b]
        assert kernel.input_gradient is not None and kernel.weight_gradient is not None
        return {
            "forward": lambda: kernel.forward(env, site, [self.x], weights, [self.y]),
            "input_gradient": lambda: kernel.input_gradient(env, site, [self.g], weights, [self.dx]),  # type: ignore[misc]
            "weight_gradient": lambda: kernel.weight_gradient(env, site, [self.x, self.g], self.dw, False),  # type: ignore[misc]
        }

    def run(self) -> Trial:
        for phase in self.phases().values():
            phase()
        return self

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x.double().view(-1, D), self.w.double(), self.g.double().view(-1, F)


# ---- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_tables_are_the_formats(name: str) -> None:
    data = torch.arange(len(values(name)), dtype=torch.uint8).view(FORMATS[name]).double()
    assert data.tolist() == list(values(name))
    assert max(values(name)) == LARGEST[name]  # type: ignore[index]


@pytest.mark.parametrize("name", FORMATS)
def test_every_border_between_fp8_values_rounds_as_by_hand(name: str) -> None:
    """All values, the ties between them, and what lies just beside these."""
    table, fp8 = values(name), Fp8(kind="rowwise", operand=name)  # type: ignore[arg-type]
    ties = [(a + b) / 2 for a, b in pairwise(table)]
    numbers = [v * s for v in (*table, *ties) for s in (1, 1 + 2.0**-20, 1 - 2.0**-20)]
    row = torch.tensor([[*numbers, *(-v for v in numbers)]], dtype=torch.float32).clamp(-table[-1], table[-1])
    view = quantise.OperandView(0, row, name)  # type: ignore[arg-type]
    made = quantise.quantised(fp8, view, torch.tensor([table[-1]]))
    assert made.scale.tolist() == [1.0]
    assert made.data.double().tolist() == [[nearest(v, name) for v in row[0].tolist()]]


def test_what_is_too_large_saturates_and_what_is_no_number_stays_none() -> None:
    row = torch.tensor([[1e9, -1e9, math.nan, 1.0]])
    made = quantise.quantised(Fp8(kind="tensorwise"), quantise.OperandView(0, row, "e4m3"), torch.tensor([448.0]))
    assert made.data.float().tolist()[0][:2] == [448.0, -448.0]
    assert made.data.float().isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(kind: str, bad: float) -> None:
    trial = Trial(ALL[kind])
    trial.x[3, 1, 5] = bad
    trial.run()
    assert not trial.y[3, 1].isfinite().any()
    assert not trial.dw[0][:, 5].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    trial = Trial(ALL[kind])
    for t in (trial.x, trial.w, trial.g):
        t.zero_()
    trial.run()
    assert not trial.y.any()
    assert not trial.dx.any()
    assert not trial.dw[0].any()


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_the_fp8_data(name: str) -> None:
    fp8 = ALL[name]
    trial = Trial(fp8).run()
    x, w, g = trial.flat()
    back = fp8.gradient
    wanted = {
        "y": rounded(x, fp8, "e4m3") @ rounded(w, fp8, "e4m3", square=True).t(),
        "dx": rounded(g, fp8, back) @ rounded(w.t(), fp8, "e4m3", square=True).t(),
        "dw": rounded(g.t(), fp8, back) @ rounded(x.t(), fp8, "e4m3").t(),
    }
    got = {"y": trial.y.view(-1, F), "dx": trial.dx.view(-1, D), "dw": trial.dw[0]}
    for what, y in wanted.items():
        error = (got[what].double() - y).abs().max() / y.abs().max()
        assert error < 2e-6, (what, error.item())  # sums of so few numbers in fp32


@pytest.mark.parametrize("name", ALL)
def test_products_are_near_those_in_16_bits(name: str) -> None:
    """Each product of two numbers is off by half a step of either, and by what is too small for FP8."""
    fp8, fine = ALL[name], 2.0**-9  # of e4m3's smallest value to 1, half of it
    trial = Trial(fp8).run()
    x, w, g = trial.flat()
    a, b = STEP["e4m3"], STEP[fp8.gradient]
    for got, one, other, step in (
        (trial.y.view(-1, F), x, w.t(), 2 * a), (trial.dx.view(-1, D), g, w, a + b), (trial.dw[0], g.t(), x, a + b)
    ):  # fmt: skip
        small = one.shape[1] * one.abs().max() * other.abs().max() * fine * 2 / 448 * (2 if fp8.powers else 1) * 64
        bound = (one.abs() @ other.abs()) * (step + step**2) + small
        assert ((got.double() - one @ other).abs() <= bound).all()


def test_fewer_share_a_scale_and_less_is_lost() -> None:
    """Of values far apart; a mistake that gives all recipes one scale is seen here."""
    lost = {}
    for kind in ("tensorwise", "rowwise", "blockwise"):
        trial = Trial(replace(RECIPE[kind], gradient="e4m3")).run()
        x, _, g = trial.flat()
        lost[kind] = ((trial.dw[0].double() - g.t() @ x).abs() / (g.t().abs() @ x.abs())).mean().item()
    assert lost["blockwise"] < lost["tensorwise"]
    assert lost["rowwise"] < lost["tensorwise"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_and_biases_as_in_the_plain_body(kind: str) -> None:
    trial = Trial(ALL[kind], bias=True)
    trial.run()
    once = [t.clone() for t in trial.dw]
    assert trial.kernel.weight_gradient is not None
    trial.kernel.weight_gradient(trial.env, trial.site, [trial.x, trial.g], trial.dw, True)
    for one, two in zip(once, trial.dw, strict=True):
        torch.testing.assert_close(two, 2 * one)
    torch.testing.assert_close(once[1], trial.g.sum((0, 1)))
    plain = Trial(ALL[kind])
    plain.run()
    torch.testing.assert_close(trial.y, plain.y + trial.b[0])


# ---- the past ----------------------------------------------------------------------------------------------------


def test_delayed_scales_are_those_of_the_past() -> None:
    fp8 = RECIPE["delayed"]
    first, current = Trial(fp8).run(), Trial(RECIPE["tensorwise"]).run()
    assert torch.equal(first.y, current.y)  # without a past
    assert first.env.amax["w"].tolist() == [t.abs().max().item() for t in (first.x, first.w, first.g)]
    later = Trial(fp8)
    later.env.past_amax["w"].copy_(2 * first.env.amax["w"])
    later.run()
    other = Trial(RECIPE["tensorwise"])
    for t, u in ((other.x, later.x), (other.w, later.w), (other.g, later.g)):
        assert torch.equal(t, u)
    assert not torch.equal(later.y, first.y)
    assert torch.equal(later.env.amax["w"], first.env.amax["w"])
    halved = Trial(fp8)
    halved.env.past_amax["w"].copy_(first.env.amax["w"] / 2)
    halved.run()
    assert halved.y.isfinite().all()  # saturated


# ---- declarations ------------------------------------------------------------------------------------------------


def unseen(*about: Any) -> None:
    """What multiplies, with all that it allocates out of sight."""
    with _disable_current_modes(), torch.no_grad():
        engine.emulated(*about)


@contextmanager
def chunks_of(elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(declared, "CHUNK", elements)
    yield


@pytest.mark.parametrize("chunk", [2**22, 1000, 16 * 64])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("kind", DECLARED)
def test_workspace_is_what_is_declared(kind: str, precision: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for bias in (False, True):
        trial = Trial(ALL[kind], precision, bias=bias, product=unseen)
        kernel, ins = declaration_of(trial.site, Layout()), [(*T, D)]
        with chunks_of(chunk, monkeypatch):
            for phase, call in trial.phases().items():
                with Storages() as storages:
                    call()
                about = (phase, ins, trial.site.weights, trial.site.attrs)
                assert storages.peak == kernel.workspace(*about, RECIPES[precision].widths), phase  # type: ignore[arg-type]
                assert storages.now == 0


@pytest.mark.parametrize("kind", KINDS)
def test_work_and_what_is_kept_are_those_of_the_word(kind: str) -> None:
    trial = Trial(ALL[kind])
    kernel, op_name, ins = declaration_of(trial.site, Layout()), Linear(), [(*T, D)]
    assert (kernel.input_keeps, kernel.weight_keeps) == (op_name.input_keeps, op_name.weight_keeps)
    for phase, call in trial.phases().items():
        with FlopCounterMode(display=False) as flops:
            call()
        about = (phase, ins, trial.site.weights, trial.site.attrs)
        assert flops.get_total_flops() == kernel.flops(*about) == op_name.flops(*about)


@pytest.mark.parametrize("kind", DECLARED)
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_ranks_are_asked_for_what_is_declared(kind: str, cut: int | None) -> None:
    trial = Trial(ALL[kind])
    trial.site = replace(trial.site, attrs={**trial.site.attrs, "cut": cut})
    kernel, asked = declaration_of(trial.site, Layout()), list[tuple[str, int]]()
    trial.env.all_reduce_max = lambda axis, x: asked.append((axis, x.numel()))
    for phase, call in trial.phases().items():
        asked.clear()
        call()
        axis, n = kernel.all_reduced_max(phase, [(*T, D)], trial.site.weights, trial.site.attrs)
        assert asked == ([(axis, n)] if axis else [])


# ---- devices -----------------------------------------------------------------------------------------------------


def _refused(monkeypatch: pytest.MonkeyPatch, policy: Policy, version: tuple[int, int], cuda: str) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    try:
        _check_fp8(policy, TargetHere(torch.device("cuda")), first=True)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "version", "cuda", "said"),
    [
        ("tensorwise", (8, 0), "12.9", "no units for tensorwise FP8 · precision.dtype · found some GPU, compute"),
        ("tensorwise", (8, 9), "12.6", ""),
        ("rowwise", (8, 9), "12.9", "fix: --precision.dtype bf16, or fp8_tensorwise"),
        ("rowwise", (9, 0), "12.6", ""),
        ("blockwise", (9, 0), "12.8", "found CUDA 12.8 / allowed 12.9 or more · fix: --precision.dtype fp8_tensorwise"),
        ("blockwise", (9, 0), "13.0", ""),
        ("blockwise", (10, 0), "13.0", "allowed 9.0"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, kind: str, version: tuple[int, int], cuda: str, said: str
) -> None:
    told = _refused(monkeypatch, RECIPES[f"fp8_{kind}"], version, cuda)
    assert said in told
    assert bool(said) == bool(told)


def test_a_gpu_takes_blocks_of_its_own_and_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(RECIPES["fp8_blockwise"], fp8=RECIPE["blockwise"])
    assert "found 16, e4m3 and e4m3 / allowed 128, e4m3" in _refused(monkeypatch, small, (9, 0), "13.0")
    wide = replace(RECIPES["fp32"], fp8=RECIPE["rowwise"])
    assert "fix: --precision.dtype fp8_rowwise" in _refused(monkeypatch, wide, (9, 0), "13.0")


def test_a_cpu_says_once_that_it_emulates(caplog: pytest.LogCaptureFixture) -> None:
    for first in (True, False):
        _check_fp8(RECIPES["fp8_rowwise"], torch.device("cpu"), first=first)
    _check_fp8(RECIPES["bf16"], torch.device("cpu"), first=True)
    assert [r.message.split(":")[0] for r in caplog.records] == ["FP8 is emulated on this device"]


def test_a_site_without_a_recipe_is_not_in_fp8() -> None:
    trial = Trial(RECIPE["tensorwise"])
    plain = replace(trial.site, attrs={})
    assert type(declaration_of(plain, Layout())) is Linear
    REFERENCE["linear"].forward(trial.env, plain, [trial.x], [trial.w], [trial.y])
    torch.testing.assert_close(trial.y.view(-1, F), trial.x.view(-1, D) @ trial.w.t())
    REFERENCE["linear"].forward(trial.env, trial.site, [trial.x], [trial.w], [trial.y])
    assert torch.equal(trial.y, Trial(RECIPE["tensorwise"]).run().y)

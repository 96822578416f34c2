"""The registry: an implementation is one entry. What is chosen, run, priced and timed follows from it alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from layouts import CPU, Case, _prepare
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.policy import RECIPES
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.kernels.checks import check_kernels
from penteract.engine.kernels.dense import DENSE
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import kernel, kernels
from penteract.errors import BadInput
from penteract.ops.declarations import OPS, Implementation, OpDeclaration, declaration_of, implementation
from penteract.ops.declarations.declaration import CallShapes, Product, product_flops
from penteract.ops.declarations.dense import RmsNorm
from penteract.ops.declarations.one_pass import ONE_PASS
from penteract.ops.declarations.quantised.fp8_linear import FP8_LINEAR
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.price import price
from penteract.readings.time.step import StepClock
from penteract.step.walk import walk
from tiny import SIZES

MODEL = ModelSpec(**SIZES)
CASE = Case(MODEL, Layout(gradient_accumulation_steps=2))
NORMS = 2 * MODEL.layers + 1
CALLS = 2 * 3 * NORMS  # two micro-batches, three phases
LATE = 1e-3  # seconds
WORKSPACE = 2**24

# ---- another rms_norm --------------------------------------------------------------------------------------------


class Slow(RmsNorm):
    """As the op declares it; in more memory and time than the reference needs."""

    def workspace(self, phase: str, ins: Any, weights: Any, attrs: Any, widths: Widths) -> int:
        return WORKSPACE

    def cost(self, rates: Any, call: CallShapes, widths: Widths, registers: Sequence[int]) -> tuple[str, float]:
        return "pointwise", LATE


ran: list[str] = []


def forward(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """By the mean of squares, as the formula is written."""
    ran.append("forward")
    x = ins[0].unflatten(-1, (-1, len(weights[0])))
    outs[1].copy_((x.square().mean(-1) + site.attrs["epsilon"]).rsqrt())
    outs[0].copy_((x * outs[1][..., None] * weights[0]).flatten(-2))


def backward(name: str) -> Any:
    def run(*about: Any) -> None:
        ran.append(name)
        getattr(DENSE["rms_norm"], name)(*about)

    return run


SLOW = {"rms_norm": TorchKernel(forward, backward("input_gradient"), backward("weight_gradient"))}
ENTRY = Implementation("slow", lambda site, layout: Slow(), {"cpu": f"{__name__}:SLOW"})


@contextmanager
def registered(op_name: str, entry: Implementation) -> Iterator[None]:
    op = OPS[op_name]
    with patch.dict(OPS, {op_name: op._replace(implementations=(entry, *op.implementations))}):
        yield


def test_one_entry_is_chosen_run_priced_and_timed() -> None:
    before = run(), priced(), seconds()
    with registered("rms_norm", ENTRY):
        ran.clear()
        gradients, memory, time = run(), priced(), seconds()
    assert ran.count("forward") == ran.count("input_gradient") == ran.count("weight_gradient") == 2 * NORMS
    for name, x in gradients.items():
        torch.testing.assert_close(x, before[0][name], rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(x, before[0][name]) for name, x in gradients.items())  # by another order of sums
    assert memory == WORKSPACE != before[1]
    assert before[2] < CALLS * LATE < time
    assert priced() == before[1]


def run() -> dict[str, torch.Tensor]:
    """Gradients of a step in one process."""
    p = CASE.compile(0)
    case = _prepare(p, ProcessGroups(), kernels(p, CPU))
    walk(case.p, case, targets_counted=False)
    return {name: x.clone() for name, x in case.state.gradients.items()}


def priced() -> int:
    """Workspace, by the walk and by layers."""
    walked = price(CASE.compile(0)).workspace
    assert Composer(MODEL, CASE.sequence_length, RECIPES["fp64"]).rank(CASE.layout, 0).workspace == walked
    return walked


def seconds() -> float:
    node = cluster("8xH100")
    composer = Composer(MODEL, CASE.sequence_length, RECIPES["bf16"])
    return StepClock(composer, node, Rates.of(node, "bf16")).seconds(CASE.layout)


def test_a_step_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where an op has two implementations in one program, either."""

    def first_layer(site: Site, layout: Layout) -> OpDeclaration | None:
        return Slow() if site.layer == 0 else None

    p = CASE.compile(0)
    with registered("rms_norm", Implementation("first layer", first_layer, ENTRY.kernels)):
        run = _prepare(p, ProcessGroups(), kernels(p, CPU))
    monkeypatch.setattr("penteract.engine.kernels.registry.implementation", None)
    ran.clear()
    walk(p, run, targets_counted=False)
    assert ran.count("forward") == ran.count("input_gradient") == ran.count("weight_gradient") == 2 * 2
    assert run.kernels["attention"] is kernel("attention", OPS["attention"].implementations[-1], "cpu")


def test_an_implementation_may_serve_some_calls_alone() -> None:
    def narrow(site: Site, layout: Layout) -> OpDeclaration | None:
        return Slow() if site.weights[0][0] <= 32 and layout.tp == 1 else None

    wide, small = (Site("rms_norm", (Spec((4, n)),), (), ("w",), ((n,),), {}) for n in (64, 32))
    with registered("rms_norm", Implementation("narrow", narrow, ENTRY.kernels)):
        assert [implementation(s, Layout())[0].name for s in (wide, small)] == ["reference", "narrow"]
        assert isinstance(declaration_of(small, Layout()), Slow)
        assert implementation(small, Layout(tp=2))[0].name == "reference"


# ---- entries -----------------------------------------------------------------------------------------------------

FP8 = Fp8(kind="rowwise", experts=True)
OF_AN_OP = ("part", "differentiable", "input_keeps", "weight_keeps", "deferrable", "passes_gradient", "overwrites",
            "forks", "results", "gradients", "carry", "products", "flops")  # fmt: skip
OF_AN_IMPLEMENTATION = ("counts_rows", "all_reduced_max", "workspace", "traffic", "timed_products", "cost")
CHOSEN = [
    ("attention", {}, Layout(), "reference"),
    ("attention", {}, Layout(attention="flash"), "flash"),
    ("attention", {}, Layout(attention="cudnn", cp=2, cp_method="ulysses"), "cudnn"),
    ("linear", {}, Layout(), "reference"),
    ("linear", {}, Layout(elementwise="triton"), "wide_product"),
    ("logits", {}, Layout(elementwise="triton"), "wide_product"),
    ("router", {}, Layout(elementwise="triton"), "triton"),
    *[(op_name, {}, Layout(elementwise="triton"), "triton") for op_name in ONE_PASS],
    *[
        (name, {}, Layout(elementwise="triton"), "triton")
        for name in ("fork_norm", "add_norm", "loss_and_gradient", "merged_linear", "packed_swiglu")
    ],
    *[(name, {}, Layout(elementwise="triton"), "quack") for name in ("merged_glu", "glu_linear")],
    *[("attention", {}, Layout(attention=name), name) for name in ("fa4", "fa4_documents")],
    *[
        (op_name, {}, Layout(attention=name), name)
        for op_name in ("packed_attention", "normed_attention")
        for name in ("fa4", "fa4_documents", "cudnn", "flash")
    ],
    *[(name, {"fp8": FP8}, Layout(), "fp8") for name in FP8_LINEAR],
    *[(name, {"fp8": FP8}, Layout(elementwise="triton"), "fp8_triton") for name in FP8_LINEAR],
    ("linear", {"fp8": FP8}, Layout(), "fp8"),
    ("linear", {"fp8": FP8}, Layout(elementwise="triton"), "fp8_triton"),
    ("expert_linear", {}, Layout(experts="grouped"), "grouped"),
    ("expert_linear", {}, Layout(experts="quack"), "quack"),
    ("expert_pair", {}, Layout(experts="quack"), "quack"),
    ("expert_linear", {"fp8": FP8}, Layout(), "fp8"),
    ("expert_linear", {"fp8": FP8}, Layout(elementwise="triton"), "fp8_triton"),
]
EVERY = [(op_name, one) for op_name, op in OPS.items() for one in op.implementations]


@pytest.mark.parametrize(("op_name", "attrs", "layout", "name"), CHOSEN)
def test_what_a_layout_chooses_is_the_op(op_name: str, attrs: dict[str, Any], layout: Layout, name: str) -> None:
    one, kernel = implementation(Site(op_name, (), (), attrs=attrs), layout)
    assert one.name == name
    for member in OF_AN_OP:
        assert getattr(type(kernel), member) is getattr(type(OPS[op_name].declaration), member), member


def test_every_entry_is_chosen_by_some_layout() -> None:
    assert {(op_name, one.name) for op_name, one in EVERY if one.name != "reference"} <= {(w, n) for w, *_, n in CHOSEN}
    assert {n for n in vars(OpDeclaration) if not n.startswith("_")} == {*OF_AN_OP, *OF_AN_IMPLEMENTATION}


@pytest.mark.parametrize(("op_name", "one"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_what_runs_is_where_its_entry_says(op_name: str, one: Implementation) -> None:
    for device in one.kernels:
        made = kernel(op_name, one, device)
        assert isinstance(made, TorchKernel)
        for phase in ("input_gradient", "weight_gradient"):
            assert (getattr(made, phase) is None) == (getattr(REFERENCE[op_name], phase) is None)


def test_what_a_device_cannot_run_is_refused() -> None:
    p = CASE.compile(0)
    check_kernels(p, CPU, packed=True)
    with (
        registered("rms_norm", ENTRY),
        pytest.raises(
            BadInput,
            match=r"'slow' of rms_norm does not run here .* found cuda / allowed cpu · fix: --precision.device cpu,",
        ),
    ):
        check_kernels(p, torch.device("cuda"), packed=True)


def test_a_call_that_nothing_serves_is_a_bug() -> None:
    with patch.dict(OPS, {"gelu": OPS["gelu"]._replace(implementations=())}), pytest.raises(Exception, match="KERNEL"):
        implementation(Site("gelu", (), ()), Layout())


@pytest.mark.parametrize("phase", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize(
    ("op_name", "n", "experts"),
    [("expert_linear", 1, "grouped"), ("expert_linear", 1, "quack"), ("expert_pair", 2, "quack")],
)
def test_products_that_are_timed_have_the_flops_of_the_op(op_name: str, n: int, experts: Any, phase: str) -> None:
    """101 rows of 8 experts, which no expert shares evenly."""
    declared = declaration_of(Site(op_name, (), ()), Layout(experts=experts))
    call = CallShapes(phase, [(101, 64), (9,)], [(8, 96, 64)] * n, {})
    timed = declared.timed_products(call)
    assert product_flops(timed) == declared.flops(*call.of_op) == n * 2 * 101 * 64 * 96
    assert (timed == (Product(1, 96, 64, 101),) * n) == (experts == "quack" and phase == "weight_gradient")

"""Linear layers in FP8 that cast once, in Triton's interpreter: the data of plain torch to the bit, and what is
declared."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.test_one_pass import angles_are_there, let_go  # noqa: F401 (a fixture)
from kernels.test_quantise import drawn
from op_kernels.case import Case, of_fp8, x
from op_kernels.cases import CASES, of_all_ops
from op_kernels.fp8 import counted
from op_kernels.trial import check
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.fp8 import Format, Fp8
from penteract.config.precision.policy import RECIPES
from penteract.config.precision.sampled_rows import EVERY, LEAST_ROWS, MARGIN
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.quantised.casters import Caster, Casters, Fp8Data, PutFp8, Slopes, typed
from penteract.engine.kernels.quantised.fp8_linear import TORCH, Fp8Kernels
from penteract.engine.kernels.triton.fusions import rotate_
from penteract.engine.kernels.triton.quantised.fp8_linear import TRITON
from penteract.ops.declarations import OPS, declaration_of
from penteract.ops.declarations.quantised import fp8_linear as declared
from penteract.ops.spec import Spec
from penteract.ops.tape import Site


def let_casts_go(how: Caster) -> Caster:
    """Without what the interpreter holds in cycles after it."""

    def fp8_of(*about: Any) -> PutFp8:
        put = how.fp8_of(*about)

        def run(*then: Any) -> None:
            put(*then)
            gc.collect()

        return run

    return replace(how, fp8_of=fp8_of)


CASTERS = TRITON._replace(of_values=let_casts_go(TRITON.of_values), of_slopes=let_casts_go(TRITON.of_slopes))
KERNELS = Fp8Kernels(CASTERS, counted, rotate_).table()
FP8 = Fp8(kind="tensorwise")
ABOUT = {"fp8": FP8, "features": 112}
TRIED = [case for case in CASES if case.op_name in KERNELS] + [
    Case("fp8_glu", "several tiles", of_fp8((70, 2), 136), ((144, 136), (144, 136)), {"fp8": FP8, "features": 288}),
    Case("quantise", "several tiles", (x(67, 2, 150),), (), {"fp8": FP8}),
    Case("fp8_linear", "several tiles", of_fp8((67, 2), 136), ((80, 136), (32, 136)), ABOUT),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("case", "precision"), of_all_ops(TRIED, "bf16", "fp32", "bf16_pure"), ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str) -> None:
    site = Site(case.op_name, (), (), attrs=case.attrs)
    declaration = declaration_of(site, Layout(elementwise="triton"))
    assert declaration is not OPS[case.op_name].declaration
    assert check(case, precision, declaration, let_go(KERNELS[case.op_name])) == []


def cast(how: Casters, fp8: Fp8, name: Format, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """FP8 data both ways round, and the scale, of matrices that lie one below the other."""
    rows, k = sum(len(x) for x in parts), parts[0].shape[1]
    rowwise, columnwise = torch.full((rows, k), 7, dtype=torch.uint8), torch.full((k, rows), 7, dtype=torch.uint8)
    into = Fp8Data(typed(rowwise, name), typed(columnwise, name))
    largest, scale, begin = torch.zeros(1), torch.zeros(1), 0
    for part in parts:
        how.of_values.put_largest(part, largest)
    for i, part in enumerate(parts):
        how.of_values.put_fp8(
            fp8, name, part, None if i else largest.clone(), scale, into.part(begin, begin + len(part))
        )
        begin += len(part)
    return [rowwise, columnwise, scale]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_fp8_data_are_those_of_plain_torch(name: Format, powers: bool, bad: float | None) -> None:
    fp8, parts = Fp8(kind="tensorwise", powers=powers), [drawn(96, 160), drawn(40, 160)]
    if bad is not None:
        parts[1][3, 5] = bad
    one, other = (cast(how, fp8, name, parts) for how in (TORCH, TRITON))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(other[0].t(), other[1])
    assert other[2].isfinite().item() == (bad is None)


def of_slopes(how: Casters, x: Slopes, *, some: bool) -> list[torch.Tensor]:
    """FP8 data both ways round, and the scale: from some of the rows, or from all."""
    rows, columns = x.packed.shape
    data = [torch.full(shape, 7, dtype=torch.uint8) for shape in ((rows, columns), (columns, rows))]
    zeros, scale, into = torch.zeros(2), torch.zeros(1), Fp8Data(*(typed(one, "e5m2") for one in data))
    if some:
        how.sampled_slopes(FP8, "e5m2", x, scale)(zeros, into)
    else:
        how.of_slopes.put_largest(x, zeros[:1])
        how.of_slopes.put_fp8(FP8, "e5m2", x, zeros[:1], scale, into)
    gc.collect()
    assert torch.equal(data[0].t(), data[1])
    return [data[0].view(torch.float8_e5m2).float(), scale]


FOUND = {
    "in it": (0, 2.0), "near it": (5, MARGIN / 2), "far above it": (5, 2.0**12 * MARGIN), "where it is zero": (5, 1.0),
    "nothing": (5, 0.0), "more than fp32 has above it": (0, 1e36),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", [TORCH, CASTERS], ids=["torch", "triton"])
@pytest.mark.parametrize("found", FOUND)
def test_a_scale_of_some_rows_cuts_nothing_off(how: Casters, found: str) -> None:
    (row, times), packed, g = FOUND[found], drawn(3 * EVERY, 288).div(50), torch.rand(3 * EVERY, 144).to(torch.bfloat16)
    if found in ("where it is zero", "nothing"):
        g[::EVERY] = 0
    g[row] *= times
    if found == "nothing":
        g.zero_()
    (values, scale), (wanted, of_all) = (of_slopes(how, Slopes(packed, g), some=some) for some in (True, False))
    above = (scale / of_all).item()
    if found in ("far above it", "where it is zero", "nothing"):
        assert above == 1
    else:
        assert above in [2.0**n for n in range(7)] and (above > 1 or found == "more than fp32 has above it")
    assert ((values * scale - wanted * of_all).abs() <= scale * 2.0**-16).all()
    large = (wanted * of_all).abs() >= scale * 2.0**-14  # normal numbers by both scales
    assert torch.equal((values * scale)[large], (wanted * of_all)[large]) and (large.any() or found == "nothing")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", [TORCH, CASTERS], ids=["torch", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 5])
def test_a_gradient_that_is_not_finite_leaves_nothing_finite(how: Casters, bad: float, row: int) -> None:
    packed, g = drawn(3 * EVERY, 288).div(50), torch.rand(3 * EVERY, 144).to(torch.bfloat16)
    g[row, 7] = bad
    values, scale = of_slopes(how, Slopes(packed, g), some=True)
    assert scale.isinf() and not (values * scale).isfinite().any()


@pytest.mark.parametrize(
    ("layout", "gradient", "rows", "once"),
    [
        (Layout(), "e5m2", LEAST_ROWS, True), (Layout(), "e5m2", LEAST_ROWS - 1, False),
        (Layout(), "e4m3", LEAST_ROWS, False), (Layout(tp=2), "e5m2", LEAST_ROWS, False),
        (Layout(cp=2), "e5m2", LEAST_ROWS, False), (Layout(dp=2, zero=3), "e5m2", LEAST_ROWS, True),
    ],
    ids=str,
)  # fmt: skip
def test_what_slopes_are_made_of_is_priced_as_often_as_it_is_read(
    layout: Layout, gradient: Format, rows: int, once: bool
) -> None:
    fp8, read = Fp8(kind="tensorwise", gradient=gradient), list[str]()

    def noted(what: str) -> Any:
        return lambda *about: read.append(what) or (lambda *then: None)

    casters = TORCH._replace(
        of_slopes=Caster(noted("for the largest"), noted("for the data")), sampled_slopes=noted("once")
    )
    case = Case("fp8_glu", "", of_fp8((rows, 1), 16), ((16, 16), (16, 16)), {"fp8": fp8, "features": 32})
    ins = tuple(Spec(i.shape, i.role) for i in case.ins)
    declaration = declaration_of(Site("fp8_glu", ins, (), attrs=case.attrs), layout.put(elementwise="triton"))
    outs = [torch.empty(n, dtype=torch.bfloat16, device="meta") for n in ((rows, 1, 32), (rows, 1, 16))]
    made = [
        torch.empty(rows, 1, 16, device="meta"),
        torch.empty(32, rows, dtype=torch.uint8, device="meta"),
        torch.zeros(1),
    ]
    weights = [torch.empty(16, 16, device="meta") for _ in range(2)]
    env = Env(Mesh(layout), 0, torch.float32)
    Fp8Kernels(casters, counted).glu_input_gradient(
        env, Site("fp8_glu", ins, (), attrs=case.attrs), [torch.zeros(1), *outs], weights, made
    )
    assert read == (["once"] if once else ["for the largest", "for the data"])
    about = [x.shape for x in ins], case.weights, case.attrs, RECIPES["bf16"].widths
    of_weights, data = 2 * 16 * 16 * (2 + 1), 2 * rows * 32
    assert declaration.passes("input_gradient", *about) == of_weights + data + len(read) * rows * (32 + 16) * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_fp8_data_of_slopes_are_those_of_plain_torch_but_for_last_bits(name: Format) -> None:
    packed, g = drawn(96, 288).div(50), drawn(96, 144)
    found = list[list[torch.Tensor]]()
    for how in (TORCH, TRITON):
        data, columnwise = torch.empty(96, 288, dtype=torch.uint8), torch.empty(288, 96, dtype=torch.uint8)
        out, largest, scale, of_out = torch.empty_like(g), torch.zeros(1), torch.zeros(1), torch.zeros(1)
        how.put_glu(packed, out, of_out)
        how.of_slopes.put_largest(Slopes(packed, g), largest)
        into = Fp8Data(typed(data, name), typed(columnwise, name))
        how.of_slopes.put_fp8(FP8, name, Slopes(packed, g), largest, scale, into)
        assert torch.equal(data.t(), columnwise)
        assert of_out == out.abs().max()
        found.append([data.view(FORMATS[name]).float() * scale, out.float()])
    for a, b in zip(*found, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_zeros_have_a_scale() -> None:
    for how in (TORCH, TRITON):
        data, columnwise, scale = cast(how, FP8, "e4m3", [torch.zeros(32, 48, dtype=torch.bfloat16)])
        assert not data.any() and not columnwise.any() and scale > 0


@pytest.mark.parametrize("room", [128 * 136, 1])
def test_a_gradient_is_added_some_rows_at_a_time(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "ROOM", room)
    attrs: dict[str, Any] = {"fp8": FP8, "features": 300}
    case = Case("fp8_linear", "many rows", of_fp8((3, 2), 136), ((260, 136), (40, 136)), attrs)
    assert check(case, "bf16") == []

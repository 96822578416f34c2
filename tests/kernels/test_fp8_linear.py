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
from penteract.config.precision.fp8 import Format, Fp8
from penteract.config.precision.sampled_rows import EVERY, MARGIN
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.quantised.casters import Caster, Casters, Fp8Data, PutFp8, Slopes, typed
from penteract.engine.kernels.quantised.fp8_linear import TORCH, Fp8Kernels
from penteract.engine.kernels.triton.fusions import rotate_
from penteract.engine.kernels.triton.quantised.fp8_linear import TRITON
from penteract.ops.declarations import OPS, declaration_of
from penteract.ops.declarations.quantised import fp8_linear as declared
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
    if not fp8.powers_of(name):  # powers of two hide that a scale is none; the FP8 data of NaN does not
        assert other[2].isfinite().item() == (bad is None)


def sampled(how: Caster, x: Any, like: torch.Tensor) -> list[torch.Tensor]:
    """FP8 data of a gradient both ways round, and the scale, from some of its rows. `like`: in what shape."""
    rows, k = like.shape
    data, columnwise = torch.full((rows, k), 7, dtype=torch.uint8), torch.full((k, rows), 7, dtype=torch.uint8)
    scale, into = torch.zeros(1), Fp8Data(typed(data, "e5m2"), typed(columnwise, "e5m2"))
    how.put_sampled(FP8, "e5m2", x, torch.zeros(2), scale, into)
    gc.collect()
    return [data, columnwise, scale]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "found", ["in the sample", "near it", "far above it", "where it is zero", "nan", "nan in it", "inf"]
)
def test_a_scale_of_some_rows_cuts_nothing_off(found: str) -> None:
    x = drawn(3 * EVERY, 160)
    if found == "where it is zero":
        x[::EVERY] = 0
    row = 2 * EVERY if found.endswith("in it") else 5
    many = {
        "near it": MARGIN / 2,
        "far above it": 2**9 * MARGIN,
        "nan": math.nan,
        "nan in it": math.nan,
        "inf": math.inf,
    }
    x[row, 7] = x[::EVERY].abs().max() * many.get(found, 1)
    one, other = (sampled(how.of_values, x, x) for how in (TORCH, CASTERS))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    data, columnwise, scale = other
    assert torch.equal(data.t(), columnwise)
    exact, _, of_all = cast(TORCH, FP8, "e5m2", [x])
    above = scale / of_all  # powers of two
    if found in ("far above it", "where it is zero"):
        assert above == 1
    elif found in ("in the sample", "near it"):
        assert 1 <= above <= MARGIN and (found == "near it" or above > 1)
    if found.startswith("nan"):
        assert data.view(torch.float8_e5m2).isnan()[row, 7]
    elif found != "inf":
        values, wanted = (d.view(torch.float8_e5m2).float() * s for d, s in ((data, scale), (exact, of_all)))
        large = wanted.abs() >= scale * 2.0**-14  # a normal number by both scales
        assert torch.equal(values[large], wanted[large]) and large.any()
        assert ((values - wanted).abs() <= scale * 2.0**-16).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("many", [1.0, 2**9 * MARGIN])
def test_slopes_by_some_rows_are_those_by_all(many: float) -> None:
    packed, g = drawn(3 * EVERY, 288).div(50), drawn(3 * EVERY, 144)
    g[5] *= many
    for how in (TORCH, CASTERS):
        largest, of_all = torch.zeros(1), torch.zeros(1)
        how.of_slopes.put_largest(Slopes(packed, g), largest)
        exact = torch.empty(3 * EVERY, 288, dtype=torch.uint8), torch.empty(288, 3 * EVERY, dtype=torch.uint8)
        into = Fp8Data(*(typed(data, "e5m2") for data in exact))
        how.of_slopes.put_fp8(FP8, "e5m2", Slopes(packed, g), largest, of_all, into)
        data, columnwise, scale = sampled(how.of_slopes, Slopes(packed, g), packed)
        assert torch.equal(data.t(), columnwise)
        assert (scale == of_all) == (many > 1)
        values, wanted = (d.view(torch.float8_e5m2).float() * s for d, s in ((data, scale), (exact[0], of_all)))
        assert ((values - wanted).abs() <= scale * 2.0**-16).all()


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

"""Fused ops in Triton's interpreter, held to their declarations; and weights that lie behind each other as one."""

from __future__ import annotations

import pytest
import torch

from kernels.test_one_pass import angles_are_there, let_go  # noqa: F401 (a fixture)
from op_kernels.case import Case, In, draw, given, stat, x
from op_kernels.cases import CASES
from op_kernels.test_wide_product import Aten
from op_kernels.trial import check
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.engine.kernels.fusions import FUSIONS as REFERENCE
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.triton.fused_loss import loss_and_gradient as loss_kernel
from penteract.engine.kernels.triton.fused_loss.loss_and_gradient import LossForm
from penteract.engine.kernels.triton.fused_loss.shared_rows import SharedForm, shared_form
from penteract.engine.kernels.triton.fusions import as_one, fusions
from penteract.ops.declarations import OPS, declaration_of
from penteract.ops.declarations.loss import OnePassLoss, row_part
from penteract.ops.tape import Site

KERNELS = fusions(Aten())
ROPE = {"head_size": 16, "plain_size": 0, "theta": 1e4, "scaling": None, "rotary_columns": 64}
LATE = torch.randn(2, 1, 17000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LATE[..., 16400] = 200.0  # its exponential is beyond fp32, and no first column tells of it
LATER = In("compute", tuple(LATE.shape), LATE)
WIDE = (
    Case("loss_and_gradient", "a late logit", (LATER, given([[3], [16500]]), stat()), (), {"axis": "tp"}),
    Case(
        "loss_and_gradient",
        "wide rows",
        (x(3, 2, 9000), draw(9000, 3, 2, low=-1), stat()),
        (),
        {"axis": "tp", "z": 1e-2},
    ),
    Case("add_norm", "a wide row", (x(3, 1, 1100), x(3, 1, 1100)), ((1100,),), {"epsilon": 1e-5}),
    Case("fork_norm", "a wide row", (x(3, 1, 1100),), ((1100,),), {"epsilon": 1e-5}),
    Case("fork_norm", "largest of many rows", (x(11, 1, 5),), ((5,),), {"epsilon": 1e-5, "largest": True}),
    Case(
        "fork_norm", "largest of many gradients", (x(11, 1, 5),), ((5,),), {"epsilon": 1e-5, "largest_gradient": True}
    ),
    Case("fork_norm", "more rows than parts", (x(11, 1, 5),), ((5,),), {"epsilon": 1e-5}),
    Case("packed_swiglu", "several tiles", (x(5, 3, 2600),)),
    Case("merged_linear", "grouped heads", (x(5, 2, 6), draw(90, 5, 2)), ((48, 6), (16, 6), (16, 6)), ROPE),
)
TRIED = [case for case in CASES if case.op_name in KERNELS] + list(WIDE)
ALL_PARTS = Case("fork_norm", "more rows than all parts", (x(700, 1, 5),), ((5,),), {"epsilon": 1e-5, "largest": True})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", TRIED, ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few parts of a norm: each is a program, of which the interpreter runs few in a second."""
    for module in ("engine.kernels.triton.fork_norm", "ops.declarations.fusions"):
        monkeypatch.setattr(f"penteract.{module}.PARTS", 3)
    declared(case, precision)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_norm_of_all_parts_does_what_it_declares() -> None:
    declared(ALL_PARTS, "bf16")


def declared(case: Case, precision: str) -> None:
    site = Site(case.op_name, (), (), attrs=case.attrs)
    declaration = declaration_of(site, Layout(elementwise="triton"))
    assert declaration is not OPS[case.op_name].declaration
    assert check(case, precision, declaration, let_go(KERNELS[case.op_name])) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernels", [KERNELS, REFERENCE], ids=["triton", "reference"])
def test_a_sum_and_its_norm_have_the_bits_of_two_calls(kernels: dict[str, TorchKernel], dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    first, second = (3 * torch.randn(7, 2, 130, generator=drawn).to(dtype) for _ in range(2))
    weight = torch.randn(130, generator=drawn).to(dtype)
    env, site = Env(Mesh(Layout()), 0, torch.float32), Site("add_norm", (), (), attrs={"epsilon": 1e-5})
    total, out, scale = outs = [torch.empty_like(first), torch.empty_like(first), torch.empty(7, 2, 1)]
    kernels["add_norm"].forward(env, site, [first, second], [weight], outs)
    normed = [torch.empty_like(out), torch.empty_like(scale)]
    kernels["fork_norm"].forward(env, site, [first + second], [weight], normed)
    assert torch.equal(total, first + second)
    assert torch.equal(out, normed[0]) and torch.equal(scale, normed[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernels", [KERNELS, REFERENCE], ids=["triton", "reference"])
def test_the_largest_of_a_norm_is_that_of_what_it_wrote(kernels: dict[str, TorchKernel]) -> None:
    """Of each sign; a NaN is the largest of all. What the register had before does not count."""
    env = Env(Mesh(Layout()), 0, torch.float32)
    site = Site("fork_norm", (), (), attrs={"epsilon": 1e-5, "largest": True})
    x, weight = torch.randn(9, 1, 130, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.ones(130)
    for sign in (1, -1):
        x[4, 0, 7] = 50 * sign
        out, largest = torch.empty_like(x), torch.full((1,), 1e9)
        kernels["fork_norm"].forward(env, site, [x], [weight.bfloat16()], [out, torch.empty(9, 1, 1), largest])
        assert largest.item() == out.abs().max().item() == out[4, 0, 7].item() * sign
    x[3] = float("nan")
    kernels["fork_norm"].forward(env, site, [x], [weight.bfloat16()], [out, torch.empty(9, 1, 1), largest])
    assert largest.isnan()


LEAST = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 200
LEAST[:, :, :64] = -torch.inf  # a whole part without a logit
FEW = In("compute", (2, 1, 300), LEAST)
IN_PARTS = (
    Case("loss_and_gradient", "a part without logits", (FEW, given([[70], [299]]), stat()), (), {"axis": "tp"}),
    Case("loss_and_gradient", "parts", (x(3, 2, 500), draw(500, 3, 2, low=-1), stat()), (), {"axis": "", "z": 1e-2}),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", IN_PARTS, ids=str)
def test_programs_that_share_rows_do_what_is_declared(
    case: Case, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penteract.ops.declarations.loss.row_part", lambda columns: 64)
    monkeypatch.setattr(loss_kernel, "FORM", SharedForm(64, 1))
    declaration = declaration_of(Site(case.op_name, (), ()), Layout(elementwise="triton"))
    assert check(case, precision, declaration, let_go(KERNELS[case.op_name])) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", [case for case in WIDE if case.op_name == "loss_and_gradient"], ids=str)
def test_a_program_for_each_row_makes_the_same_loss(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernel, "FORM", LossForm())
    assert check(case, "bf16", OnePassLoss(), let_go(KERNELS[case.op_name])) == []


def test_parts_of_rows_are_those_that_were_fastest() -> None:
    assert shared_form(128256) == SharedForm(row_part(128256), 4) == SharedForm(8192, 4)
    assert shared_form(151936) == SharedForm(row_part(151936), 2) == SharedForm(4096, 2)


def test_weights_behind_each_other_are_one_matrix() -> None:
    bucket = torch.randn(100)
    first, second = bucket[4:24].view(4, 5), bucket[24:54].view(6, 5)
    whole = as_one([first, second])
    assert whole is not None
    assert torch.equal(whole, torch.cat([first, second]))
    assert as_one([second, first]) is None
    assert as_one([first, bucket[25:55].view(6, 5)]) is None
    assert as_one([first, torch.randn(6, 5)]) is None


def test_one_product_is_what_its_parts_are() -> None:
    bucket, gradients = torch.randn(60), [torch.full((60,), 7.0) for _ in range(2)]
    weights = [bucket[:20].view(4, 5), bucket[20:50].view(6, 5)]
    env, h, g = Env(Mesh(Layout()), 0, torch.float32), torch.randn(3, 2, 5), torch.randn(3, 2, 10)
    site = Site("merged_linear", (), ())
    for add in (False, True):
        for kernels, bucket_of in ((KERNELS, gradients[0]), (REFERENCE, gradients[1])):
            into = [bucket_of[:20].view(4, 5), bucket_of[20:50].view(6, 5)]
            kernels["merged_linear"].weight_gradient(env, site, [h, g], into, add)  # type: ignore[misc]
    torch.testing.assert_close(*gradients)
    for phase, ins, shape in (("forward", [h], (3, 2, 10)), ("input_gradient", [g], (3, 2, 5))):
        outs = [torch.empty(shape), torch.empty(shape)]
        for kernels, out in zip((KERNELS, REFERENCE), outs, strict=True):
            getattr(kernels["merged_linear"], phase)(env, site, ins, weights, [out])
        torch.testing.assert_close(*outs)

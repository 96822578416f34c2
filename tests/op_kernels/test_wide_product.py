"""Weight gradients summed in the bucket, without a GPU: its products replaced by their arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from op_kernels.case import Case, x
from op_kernels.cases import CASES
from op_kernels.trial import check
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.wide_product import wide_products
from penteract.ops.declarations.declaration import CallShapes, Product
from penteract.ops.declarations.wide_product import WIDE_PRODUCT


class _Wide:
    """`mm` and `addmm` of 16-bit factors, summed and written in another dtype: as `torch.ops.aten` has on GPUs."""

    def __init__(self, *, added: bool) -> None:
        self.added = added
        self.calls = 0

    def dtype_out(self, *about: Any, out: torch.Tensor) -> torch.Tensor:
        *into, a, b, dtype = about
        assert len(into) == self.added
        assert dtype == out.dtype == torch.float32
        assert a.dtype == b.dtype in (torch.bfloat16, torch.float16)
        self.calls += 1
        with _disable_current_modes():
            a, b = a.contiguous(), b.contiguous()  # strided factors would be copied on a CPU
            product = torch.mm(a.float(), b.float())
            out.copy_(into[0] + product if into else product)
            unread = torch.empty(len(a), b.shape[1], dtype=a.dtype)
        torch.mm(a, b, out=unread)  # its FLOPs are seen, and no memory
        return out


class Aten:
    def __init__(self) -> None:
        self.mm, self.addmm = _Wide(added=False), _Wide(added=True)


TRIED = [case for case in CASES if case.op_name in WIDE_PRODUCT]
TRIED.append(Case("logits", "many columns at a time", (x(9, 2, 5),), ((70, 5),), {"columns": 16}))


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("case", TRIED, ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str) -> None:
    aten = Aten()
    assert check(case, precision, WIDE_PRODUCT[case.op_name], wide_products(aten)[case.op_name]) == []
    wide = precision in ("bf16", "fp16")
    assert (aten.mm.calls, aten.addmm.calls) == (wide, wide)


class Told:
    """Rates that note which products they are asked for, and take no time."""

    def __init__(self) -> None:
        self.asked: list[Product] = []

    def product(self, p: Product) -> float:
        self.asked.append(p)
        return 0.0

    def moved(self, amount: int, walked: int = 0) -> float:
        return 0.0


@pytest.mark.parametrize(("precision", "products"), [("bf16", 1), ("bf16_pure", 8)])
def test_all_columns_of_logits_are_one_product(precision: str, products: int) -> None:
    """Where its bucket has the dtype of its factors, some at a time."""
    told: Any = Told()
    call = CallShapes("weight_gradient", [(4096, 1, 2048)], [(32000, 2048)], {"columns": 4000})
    WIDE_PRODUCT["logits"].cost(told, call, RECIPES[precision].widths, list)
    assert len(told.asked) == products
    assert sum(p.m * p.n * p.k for p in told.asked) == 32000 * 2048 * 4096

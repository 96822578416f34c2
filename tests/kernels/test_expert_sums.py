"""Weight gradients of experts that a product made beside their bucket, put into it in one pass: by the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.test_one_pass import let_go
from op_kernels.cases import Case
from op_kernels.test_grouped_experts import CASES, NAN, poisoned
from op_kernels.trial import check
from penteract.engine.kernels.moe.grouped_experts import MadeBeside, expert_products
from penteract.engine.kernels.triton.moe import expert_sums
from penteract.engine.kernels.triton.moe.expert_sums import OnePassSums
from penteract.ops.declarations.moe.grouped_experts import GROUPED


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_put_into_their_bucket(case: Case, precision: str) -> None:
    """Of experts without rows nothing is read."""
    kernel = let_go(expert_products(OnePassSums(poisoned)))
    assert [line for line in check(case, precision, GROUPED["grouped"], kernel) if "workspace" not in line] == []


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_several_tiles_each_is_put(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, add: bool) -> None:
    """As plain torch puts it, to the bit; where a product's rows are padded, by plain torch."""
    monkeypatch.setattr(expert_sums, "_TILE", 64)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    made = torch.randn(3, 7, 24, generator=generator).bfloat16()
    made[1] = NAN
    before = torch.randn(3, 7, 24, generator=generator).to(dtype)
    padded = torch.empty(3, 7, 32, dtype=made.dtype)[:, :, :24].copy_(made)
    a, b = torch.empty(8, 7), torch.empty(8, 24)
    results = list[torch.Tensor]()
    for kind, product in ((OnePassSums, made), (OnePassSums, padded), (MadeBeside, made)):
        into = before.clone()
        kind(lambda *about, product=product: product.clone(memory_format=torch.preserve_format)).sums(
            a, b, offsets, into, add
        )
        results.append(into)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])

"""Weight gradients of experts that a product made beside their bucket, put into it in one pass: by the interpreter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.test_one_pass import let_go
from op_kernels.case import Case
from op_kernels.test_grouped_experts import CASES
from op_kernels.trial import check
from penteract.engine.kernels.moe.grouped_experts import MadeBeside, by_torch, emulated, expert_products
from penteract.engine.kernels.triton.moe import expert_sums
from penteract.engine.kernels.triton.moe.expert_sums import OnePassSums
from penteract.ops.declarations.moe.grouped_experts import GROUPED

NAN = float("nan")


def _poisoned(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Nobody has written what experts without rows have."""
    made = emulated(a, b, offsets)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if b.dim() == 2 and begin == end:
            made[expert].fill_(NAN)
    return made


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_put_into_their_bucket(case: Case, precision: str) -> None:
    """Of experts without rows nothing is read."""
    kernel = let_go(expert_products(OnePassSums(_poisoned)))
    assert check(case, precision, GROUPED["grouped"], kernel) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_s_own_computes_the_same(case: Case) -> None:
    """Its FLOPs are not counted by torch, nor does it allocate the same on a CPU: values alone are looked at."""
    found = check(case, "bf16", GROUPED["grouped"], let_go(expert_products(OnePassSums(by_torch))))
    assert [line for line in found if "FLOPs" not in line and "workspace" not in line] == []


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_several_tiles_each_is_put(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, add: bool) -> None:
    """As plain torch puts it, to the bit."""
    monkeypatch.setattr(expert_sums, "_TILE", 64)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    made = torch.randn(3, 7, 24, generator=generator).bfloat16()
    before = torch.randn(3, 7, 24, generator=generator).to(dtype)
    a, b = torch.empty(8, 7), torch.empty(8, 24)
    results = list[torch.Tensor]()
    for kind, empty in ((OnePassSums, NAN), (MadeBeside, 0.0)):
        made[1], into = empty, before.clone()
        kind(lambda *about: made.clone()).sums(a, b, offsets, into, add)
        results.append(into)
    assert torch.equal(*results)

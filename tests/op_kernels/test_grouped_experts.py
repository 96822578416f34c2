"""Experts' products by groups: what torch's and quack's promise, by plain arithmetic, against what is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from op_kernels.case import Case, given, x
from op_kernels.trial import check
from penteract.engine.kernels.moe.grouped_experts import (
    EMULATED,
    Quack,
    Tile,
    emulated,
    expert_pair_products,
    expert_products,
    tile_of,
)
from penteract.ops.declarations.moe.grouped_experts import GROUPED, PAIR


def _case(what: str, sizes: list[int], width: int, out: int) -> Case:
    offsets = given(torch.tensor([0, *sizes]).cumsum(0), "offset")
    return Case("expert_linear", what, (x(sum(sizes), width), offsets), ((len(sizes), out, width),))


CASES = [
    _case("one without rows", [3, 0, 4], 16, 24),
    _case("one", [5], 8, 16),
    _case("none has rows", [0, 0], 8, 16),
    _case("first and last without rows", [0, 7, 1, 0], 24, 8),
]


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_result_made_beside_does_what_it_declares(case: Case, precision: str) -> None:
    assert check(case, precision, GROUPED["grouped"], EMULATED["expert_linear"]) == []


# ---- quack -----------------------------------------------------------------------------------------------------------


class Tuned:
    """`gemm_tuned.fn` as version 0.6.5 has it, of what is asked here: no memory, and its FLOPs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def gemm_tuned(self) -> Any:
        return self

    def fn(  # noqa: PLR0913 - the package's arguments
        self, A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, C: torch.Tensor | None = None, *, config: Tile,
        dynamic_scheduler: bool, add_to_output: bool = False,
        cu_seqlens_m: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        offsets = cu_seqlens_m if cu_seqlens_m is not None else cu_seqlens_k
        assert offsets is not None
        assert dynamic_scheduler  # four bytes of memory, which are not looked at
        assert offsets.dtype == torch.int32
        assert len(A) or cu_seqlens_m is None
        if cu_seqlens_k is not None:
            assert A.stride(0) == B.stride(1) == 1
        else:
            assert A.stride(1) == out.stride(1) == 1
            assert not add_to_output
            assert C is None or C is out
        adds = add_to_output or C is not None
        self.calls.append((config, adds))
        with _disable_current_modes():
            wide = emulated(A.double(), B.double(), offsets)
            if B.dim() == 2:
                wide[offsets[1:] == offsets[:-1]] = 0.0
            out.copy_(out + wide if adds else wide)
            unread = torch.empty(wide.shape, dtype=A.dtype)
        _count(A, B, offsets, unread)


def _count(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """FLOPs, seen without memory."""
    with _disable_current_modes():
        ends = offsets.tolist()
    for e, (begin, end) in enumerate(pairwise(ends)):
        if begin < end and b.dim() == 3:
            torch.mm(a[begin:end], b[e], out=out[begin:end])
        elif begin < end:
            torch.mm(a[:, begin:end], b[begin:end], out=out[e])


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quack_writes_where_results_belong(case: Case, precision: str) -> None:
    tuned = Tuned()
    kernel = expert_products(Quack(lambda: tuned, lambda tile: tile))
    assert check(case, precision, GROUPED["quack"], kernel) == []
    some = bool(case.ins[0].shape[0])
    assert [added for _, added in tuned.calls] == [False, False, False, True] * some


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_of_a_pair_the_second_adds_to_the_first_s_input_gradient(case: Case, precision: str) -> None:
    tuned, both = Tuned(), replace(case, op_name="expert_pair", weights=case.weights * 2)
    kernel = expert_pair_products(Quack(lambda: tuned, lambda tile: tile))
    assert check(both, precision, PAIR, kernel) == []
    some = bool(case.ins[0].shape[0])
    assert [added for _, added in tuned.calls] == [*[False] * 3, True, *[False] * 2, *[True] * 2] * some


def test_tiles_leave_no_rest_where_they_can() -> None:
    assert [tile_of(n)[1] for n in (768, 2048, 1536, 1408, 8)] == [192, 256, 192, 192, 192]


def test_the_package_is_called_as_it_is() -> None:
    """Where it is installed: the arguments that are used have these names."""
    interface: Any = pytest.importorskip("quack.gemm_interface")
    fn: Callable[..., Any] = interface.gemm_tuned.fn
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount]
    assert {"A", "B", "out", "C", "config", "cu_seqlens_m", "cu_seqlens_k", "add_to_output", "dynamic_scheduler"} <= {
        *names
    }

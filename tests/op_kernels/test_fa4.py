"""The private functions of flash-attn-4 that are called, where it is installed; and what tests put for them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from op_kernels.fa4 import Fa4
from op_kernels.fused import Case, Trial
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.kernel_limits import FA4, installed_packages, most_documents
from penteract.engine.device.storages import Storages
from penteract.engine.kernels.fused_attention.fa4 import documents, library
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.fused_attention.fa4 import Fa4Attention, Fa4Documents, _Heads

CALLED = ("_flash_attn_fwd", "_flash_attn_bwd")
DEFAULTS = {"softcap": (None, 0.0), "learnable_sink": (None,), "deterministic": (False,), "num_splits": (1,)}


@pytest.mark.skipif(not installed_packages(FA4), reason="needs flash-attn-4")
@pytest.mark.parametrize("name", CALLED)
def test_the_package_takes_what_it_is_told(name: str):
    """Positional tensors come first, what is told by name is there, and what is not told is off."""
    theirs, ours = (inspect.signature(getattr(x, name)).parameters for x in (library(), Fa4()))
    first = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(theirs)[: len(first)] == first
    assert [told for told in ours if told not in theirs] == []
    assert all(p.default is not p.empty for p in list(theirs.values())[len(first) :])
    off = {told: p.default for told, p in theirs.items() if told in DEFAULTS}
    assert {told: v for told, v in off.items() if v not in DEFAULTS[told]} == {}


@pytest.mark.parametrize("size", [8, 72, 128])
def test_many_documents_need_lists_of_tiles(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("op_kernels.fa4._hidden", lambda f: None)  # it allocates, and computes nothing: that is long
    tokens = 64 * 256 + 64
    case = Case("fa4_documents", tokens=tokens, heads=(2, 1), size=size)
    trial = Trial(case, "bf16")
    declared, shapes = declaration_of(trial.site, case.plan), [s.shape for s in trial.site.ins]
    assert most_documents(tokens) == 257
    for phase, call in (("forward", trial.forward), ("input_gradient", trial.backward)):
        with Storages() as storages:
            call(documents(Fa4))
        about: tuple[Any, ...] = (phase, shapes, (), trial.site.attrs, RECIPES["bf16"].widths)
        assert declared.workspace(*about) == storages.peak, phase


# Bytes that a call back allocated on an H200: sequences, their tokens, heads of queries and keys, their size; in any
# order, and in the same order whenever it is called.
ON_GPU = [
    ((2, 8192, 32, 8, 128), 406_847_488, 406_896_640), ((2, 4096, 16, 16, 128), 68_157_440, 68_165_632),
    ((4, 4096, 32, 4, 128), 339_738_624, 339_779_584), ((1, 32_768, 32, 8, 64), 411_041_792, 411_107_328),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "any_order", "in_order"), ON_GPU)
def test_what_a_gpu_allocated(shape: tuple[int, ...], any_order: int, in_order: int) -> None:
    b, s, heads, kv_heads, size = shape
    ins = [(s, b, n * size) for n in (heads, kv_heads, kv_heads)]
    attrs = {"head_size": size, "value_size": size}
    for ordered, bytes_ in ((False, any_order), (True, in_order)):
        declared = Fa4Attention(in_order=ordered)
        assert declared.workspace("input_gradient", ins, (), attrs, RECIPES["bf16"].widths) == bytes_


def test_what_a_gpu_allocated_for_turns_of_documents() -> None:
    """Six of them in 8,192 tokens: what the call allocated beyond that in any order."""
    assert Fa4Documents(in_order=True).turns(_Heads(32, 8, 128), 6, 8192, 8192) == 216_252_416 - 216_104_960
    assert Fa4Documents(in_order=True).turns(_Heads(32, 8, 64), 6, 8192, 8192) == 112_492_544 - 112_394_240

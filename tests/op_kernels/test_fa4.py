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

"""Every kernel against its formula and its declaration: values, gradients, FLOPs, bytes kept and bytes of workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_kernels.case import Case
from op_kernels.cases import CASES, of_all_ops
from op_kernels.formulas.table import FORMULAS
from op_kernels.trial import check
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops.declarations import OPS, OpDeclaration

# Said inside redistributions, whose backward is a program of its own, or of integers alone; or a call of two ops.
FORWARD_ONLY = {
    "merge_attention", "row_max", "exp_sum", "negative_log_likelihood", "cross_entropy_gradient", "logits_gradient",
    "loss_and_gradient", "sort_chunks", "sort_blocks", "add_norm", "pack_heads", "unpack_heads",
}  # fmt: skip
INPUT_GRADIENT_ONLY = {"glu_linear"}  # of two ops in one call: weight gradients are those of each


@pytest.mark.parametrize(("case", "precision"), of_all_ops(CASES, "fp64", "bf16", "fp32", "bf16_pure", "fp16"), ids=str)
def test_a_body_does_what_it_declares(case: Case, precision: str):
    assert check(case, precision) == []


def test_every_word_is_tried():
    assert {c.op_name for c in CASES} == set(OPS) == set(REFERENCE) == set(FORMULAS)
    assert len({str(c) for c in CASES}) == len(CASES)


@pytest.mark.parametrize("op_name", OPS)
def test_a_body_has_the_phases_that_its_declaration_asks_for(op_name: str):
    kernel, torch_kernel = OPS[op_name].declaration, REFERENCE[op_name]
    asked = bool(kernel.differentiable) and not kernel.passes_gradient and op_name not in FORWARD_ONLY
    assert (torch_kernel.input_gradient is not None) == asked
    has_weights = any(c.weights for c in CASES if c.op_name == op_name)
    has_weights &= op_name not in FORWARD_ONLY | INPUT_GRADIENT_ONLY
    assert (torch_kernel.weight_gradient is not None) == has_weights
    assert torch_kernel.weight_gradient is not None or not kernel.weight_keeps


# ---- the test can fail -------------------------------------------------------------------------------------------


def _patched(kernel: OpDeclaration, **members: Any) -> OpDeclaration:
    return type("Patched", (type(kernel),), members)()


def _first(op_name: str) -> Case:
    return next(c for c in CASES if c.op_name == op_name)


@pytest.mark.parametrize("op_name", OPS)
def test_workspace_eight_bytes_too_large_is_seen(op_name: str):
    kernel = _patched(
        OPS[op_name].declaration, workspace=lambda self, *about: OPS[op_name].declaration.workspace(*about) + 8
    )
    assert any("workspace" in d for d in check(_first(op_name), "fp64", kernel))


@pytest.mark.parametrize("op_name", ["linear", "expert_linear", "attention", "router"])
def test_doubled_flops_are_seen(op_name: str):
    kernel = _patched(OPS[op_name].declaration, flops=lambda self, *about: 2 * OPS[op_name].declaration.flops(*about))
    assert any("FLOPs" in d for d in check(_first(op_name), "fp64", kernel))


KEPT = [(w, m, n) for w, op in OPS.items() for m in ("input_keeps", "weight_keeps") for n in getattr(op.declaration, m)]


@pytest.mark.parametrize(("op_name", "member", "name"), KEPT)
def test_a_kept_name_dropped_is_seen(op_name: str, member: str, name: str):
    left = tuple(n for n in getattr(OPS[op_name].declaration, member) if n != name)
    assert check(_first(op_name), "fp64", _patched(OPS[op_name].declaration, **{member: left}))


@pytest.mark.parametrize("op_name", [w for w, op in OPS.items() if op.declaration.input_keeps])
def test_a_name_kept_for_nothing_is_seen(op_name: str):
    kernel = OPS[op_name].declaration
    assert check(_first(op_name), "fp64", _patched(kernel, input_keeps=(*kernel.input_keeps, "in0")))


def test_a_body_that_keeps_for_itself_is_seen():
    hidden: list[torch.Tensor] = []

    def hoard(env: Any, site: Any, ins: Any, weights: Any, outs: Any) -> None:
        hidden.append(ins[0].clone())
        REFERENCE["gelu"].forward(env, site, ins, weights, outs)

    found = check(_first("gelu"), "fp64", torch_kernel=TorchKernel(hoard, REFERENCE["gelu"].input_gradient))
    assert any("left behind" in d for d in found)
    assert any(d.startswith("kept") for d in found)


def test_a_wrong_gradient_is_seen():
    def wrong(env: Any, site: Any, ins: Any, weights: Any, outs: Any) -> None:
        REFERENCE["gelu"].input_gradient(env, site, ins, weights, outs)  # type: ignore[misc]
        outs[0].mul_(1 + 1e-8)

    assert check(_first("gelu"), "fp64", torch_kernel=TorchKernel(REFERENCE["gelu"].forward, wrong))

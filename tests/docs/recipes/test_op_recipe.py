"""The recipe for an op is followed: a declaration and a kernel, and nothing else has to know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import oracle
from layouts import Case, Verdict, run_case
from op_kernels import cases as trials
from op_kernels import trial
from op_kernels.formulas.table import FORMULAS
from op_kernels.formulas.truth import Room, Truth
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN
from penteract.config.precision.policy import RECIPES
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.kernels import dense as dense_kernels
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.errors import BadInput
from penteract.ops.declarations import OPS, Implementation, OpDeclaration
from penteract.ops.declarations.registry import Op
from penteract.ops.do import Do, Value
from penteract.ops.tape import Site
from penteract.readings.price import price
from pool import Pool
from readings.test_composed import check as equals_the_walk
from tiny import SIZES

DENSE = ModelSpec(**SIZES)
GELU = replace(DENSE, activation="gelu")


class SquaredRelu(OpDeclaration):
    """max(x, 0)² (So 2021, 2109.08668)"""

    input_keeps = ("in0",)


def squared_relu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    torch.clamp(ins[0], min=0, out=outs[0])
    outs[0].square_()


def squared_relu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    torch.clamp(ins[0], min=0, out=outs[0])
    outs[0].mul_(ins[1]).mul_(2)


def formula(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.relu(ins[0]) ** 2])


RELU = TorchKernel(squared_relu, squared_relu_input)


@contextmanager
def op_known() -> Iterator[None]:
    """An entry of `DENSE` in the declarations, one in the kernels; and the network says it where it said GELU."""
    table = "penteract.engine.kernels.dense:DENSE"
    declared = SquaredRelu()
    reference = Implementation("reference", lambda site, layout: declared, {"cpu": table, "cuda": table})

    def instead(self: Do, x: Value) -> Value:
        return self.op("squared_relu", x)[0]

    with ExitStack() as stack:
        stack.enter_context(patch.dict(OPS, {"squared_relu": Op(declared, (reference,))}))
        stack.enter_context(patch.dict(dense_kernels.DENSE, {"squared_relu": RELU}))
        stack.enter_context(patch.dict(REFERENCE, {"squared_relu": RELU}))
        stack.enter_context(patch.dict(FORMULAS, {"squared_relu": formula}))
        stack.enter_context(patch.object(Do, "gelu", instead))
        stack.enter_context(patch.object(oracle.F, "gelu", lambda x, approximate: torch.relu(x) ** 2))
        yield


def run_op(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with op_known():
        return run_case(rank, groups, case)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_an_op_is_a_declaration_and_a_kernel(precision: str) -> None:
    """Values, gradients, what it keeps and allocates: by the trial that every op is put to."""
    with op_known():
        rows = trials.Case("squared_relu", "rows", (trials.x(4, 2, 5),))
        assert trial.check(rows, precision) == []
        roomy = type("Roomy", (SquaredRelu,), {"workspace": lambda self, *about: 8})()
        assert any("workspace" in said for said in trial.check(rows, precision, roomy))
        needless = type("Needless", (SquaredRelu,), {"input_keeps": ("in0", "out0")})()
        assert trial.check(rows, precision, needless)


def test_an_op_is_recorded_priced_and_run(pool: Pool) -> None:
    layout = Layout(tp=2, recompute=("squared_relu",))
    with op_known():
        p = Case(GELU, layout).compile(0)
        said = [op.site for op in p.chunks[0].tape.ops if op.site.op_name == "squared_relu"]
        assert [site.layer for site in said] == [0, 1]
        assert all(site.line.startswith("model/mlp.py:") or "test_op_recipe" in site.line for site in said)
        equals_the_walk(GELU, layout, 16, RECIPES["bf16"], PLAIN)
        assert sum(bytes_ for _, bytes_ in price(p).kept) < sum(
            bytes_ for _, bytes_ in price(Case(GELU, Layout(tp=2, recompute=())).compile(0)).kept
        )
    assert not [v for v in pool.run(run_op, Case(GELU, layout)) if v.red]
    with pytest.raises(BadInput, match="no op of the program"):
        Case(GELU, layout).compile(0)

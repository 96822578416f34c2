"""The recipe for a kernel is followed: an implementation that a layout chooses."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from layouts import CPU, Case, _prepare
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import kernel, kernels
from penteract.ops.declarations import OPS, Implementation
from penteract.ops.declarations.declaration import CallShapes
from penteract.ops.tape import Site
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.price import price
from penteract.readings.time.step import StepClock
from penteract.step.walk import walk
from tiny import SIZES

DENSE = ModelSpec(**SIZES)
LATE = 0.1  # seconds: more than the host needs to launch all of the step


class Fused(type(OPS["swiglu"].declaration)):
    """As the op declares it, but slow: seen in a time."""

    def cost(self, rates: Any, call: CallShapes, widths: Any, registers: Any) -> tuple[str, float]:
        return "pointwise", LATE


calls: list[str] = []


def fused(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    calls.append(site.op_name)
    torch.mul(ins[0] * torch.sigmoid(ins[0]), ins[1], out=outs[0])


KERNELS = {"swiglu": TorchKernel(fused, REFERENCE["swiglu"].input_gradient)}


@cache
def fused_declaration() -> Fused:
    return Fused()


def test_a_kernel_is_an_implementation_that_a_layout_chooses() -> None:
    """By the key that a run file has for it. It keeps what the reference keeps, and is priced and timed as declared."""
    entry = Implementation(
        "fused", lambda site, layout: fused_declaration() if layout.elementwise == "triton" else None,
        {"cpu": f"{__name__}:KERNELS"},
    )  # fmt: skip
    plain = {name: op._replace(implementations=op.implementations[-1:]) for name, op in OPS.items()}
    op = plain["swiglu"]
    cases = {name: Case(DENSE, Layout(elementwise=name)) for name in ("reference", "triton")}
    with patch.dict(OPS, plain | {"swiglu": op._replace(implementations=(entry, *op.implementations))}):
        assert kernel("swiglu", entry, "cpu") is KERNELS["swiglu"]
        gradients, prices = {}, {}
        for name, case in cases.items():
            p = case.compile(0)
            calls.clear()
            run = _prepare(p, ProcessGroups(), kernels(p, CPU))
            walk(p, run, targets_counted=False)
            assert len(calls) == (DENSE.layers if name == "triton" else 0)
            gradients[name] = {n: x.clone() for n, x in run.state.gradients.items()}
            prices[name] = price(p)
        for n, x in gradients["reference"].items():
            torch.testing.assert_close(gradients["triton"][n], x, rtol=1e-9, atol=1e-12)
        assert prices["triton"].kept == prices["reference"].kept
        node = cluster("8xH100")
        steps = StepClock(Composer(DENSE, 16, "bf16"), node, Rates.of(node, "bf16"))
        took = {name: steps.seconds(case.layout) for name, case in cases.items()}
        assert took["triton"] - took["reference"] > DENSE.layers * LATE

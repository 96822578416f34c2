"""The registry: what each op declares, and what computes it.

An implementation is one entry here: its name, where it serves (with the workspace and the cost that it has there), and
what runs, named by the module below the torch line that has it. Price, time and run select by the same function, so
none of them knows a kernel. A layout says which kernels it wants; what these need of a policy and a device is looked at
once, where they are asked for (`spec/kernels.py`, `engine/bodies/kernels.py`): they are refused then, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penteract.errors import Bug
from penteract.ops.bodies.attention import ATTENTION
from penteract.ops.bodies.body import Body, Serves
from penteract.ops.bodies.cudnn import CudnnAttention
from penteract.ops.bodies.dense import DENSE
from penteract.ops.bodies.experts import EXPERTS
from penteract.ops.bodies.flash import FlashAttention
from penteract.ops.bodies.fp8 import scaled_linear, with_recipe
from penteract.ops.bodies.fp8_experts import scaled_experts
from penteract.ops.bodies.fused import asked_for
from penteract.ops.bodies.loss import LOSS
from penteract.ops.tape import Site
from penteract.spec.layout import Layout

_RUNS = "penteract.engine"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op. It keeps what the op keeps, so tapes, slots and formulas are the same with any.

    serves   (site, layout) -> its declaration there, a subclass of the op's; None where it is not for this call
    kernels  device type -> "module:table", a `TorchBody` for each op; a device that is not here cannot run it
    """

    name: str
    serves: Serves
    kernels: Mapping[str, str]


class Op(NamedTuple):
    """`implementations`: the first that serves a call computes it. The last is the reference, which serves all."""

    declaration: Body
    implementations: tuple[Implementation, ...]


def implementation(site: Site, layout: Layout) -> tuple[Implementation, Body]:
    """What computes an op where it is said, under a layout, and its declaration there."""
    for one in OPS[site.op_name].implementations:
        if (body := one.serves(site, layout)) is not None:
            return one, body
    raise Bug("KERNEL", f"nothing computes {site}")


def body_of(site: Site, layout: Layout) -> Body:
    """The declaration of what computes an op where it is said."""
    return implementation(site, layout)[1]


def _ops(bodies: Mapping[str, Body], reference: str) -> dict[str, Op]:
    """The ops of one file, each with its reference implementation: plain torch, on any device."""
    table = f"{_RUNS}.bodies.{reference}"
    made = dict[str, Op]()
    for op_name, body in bodies.items():
        plain = Implementation("reference", lambda site, layout, body=body: body, {"cpu": table, "cuda": table})
        made[op_name] = Op(body, (*_KERNELS.get(op_name, ()), plain))
    return made


# FP8 products run in units that GPUs have; elsewhere they are emulated, with the same codes and scales.
_KERNELS: Mapping[str, tuple[Implementation, ...]] = {
    "attention": (
        Implementation("cudnn", asked_for("cudnn", CudnnAttention), {"cuda": f"{_RUNS}.bodies.cudnn:CUDNN"}),
        Implementation("flash", asked_for("flash", FlashAttention), {"cuda": f"{_RUNS}.bodies.flash:FLASH"}),
    ),
    "linear": (
        Implementation(
            "fp8", with_recipe(scaled_linear, "reference"),
            {"cuda": f"{_RUNS}.bodies.fp8:FP8", "cpu": f"{_RUNS}.bodies.fp8:EMULATED"},
        ),
        Implementation("fp8_triton", with_recipe(scaled_linear, "triton"), {"cuda": f"{_RUNS}.kernels.fp8:FP8"}),
    ),
    "expert_linear": (
        Implementation(
            "fp8", with_recipe(scaled_experts, "reference"),
            {"cuda": f"{_RUNS}.bodies.fp8_experts:FP8", "cpu": f"{_RUNS}.bodies.fp8_experts:EMULATED"},
        ),
        Implementation("fp8_triton", with_recipe(scaled_experts, "triton"), {"cuda": f"{_RUNS}.kernels.fp8:FP8"}),
    ),
}  # fmt: skip

OPS: dict[str, Op] = (
    _ops(DENSE, "dense:DENSE")
    | _ops(ATTENTION, "attention:ATTENTION")
    | _ops(LOSS, "loss:LOSS")
    | _ops(EXPERTS, "experts:EXPERTS")
)

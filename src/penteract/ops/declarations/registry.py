"""The registry: what each op declares, and what computes it.

An implementation is one entry here: its name, which calls it serves (with its workspace and cost there), and which
kernels of `engine/` run, by module name. Price, time and run select by the same function, so none of them knows a
kernel. A layout chooses its kernels. What they need of a precision policy and a device is checked once, when they are
chosen (`config/rules/kernel_limits.py`, `engine/kernels/checks.py`): a kernel that cannot run is refused, never
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penteract.config.layout import AttentionKernel, Layout
from penteract.errors import Bug
from penteract.ops.declarations.attention import ATTENTION
from penteract.ops.declarations.declaration import OpDeclaration, Serves
from penteract.ops.declarations.dense import DENSE
from penteract.ops.declarations.forms import Takes, aligned_rows, anything
from penteract.ops.declarations.fused_attention.cudnn import CudnnAttention
from penteract.ops.declarations.fused_attention.fa4 import Fa4Attention, Fa4Documents
from penteract.ops.declarations.fused_attention.flash import FlashAttention
from penteract.ops.declarations.fused_attention.fused import FusedAttention, when_chosen
from penteract.ops.declarations.fused_attention.normed_attention import NORMED_ATTENTION, normed
from penteract.ops.declarations.fusions import FUSIONS, one_pass, packed
from penteract.ops.declarations.glu import GLU, stored
from penteract.ops.declarations.loss import LOSS
from penteract.ops.declarations.moe.balance import BALANCE
from penteract.ops.declarations.moe.blocks import BLOCKS, IN_BLOCKS
from penteract.ops.declarations.moe.experts import EXPERTS
from penteract.ops.declarations.moe.grouped_experts import by_groups, in_pairs
from penteract.ops.declarations.moe.narrow_router import narrow_router
from penteract.ops.declarations.moe.padded_rows import PADDED, PADDED_ROWS
from penteract.ops.declarations.one_pass import ONE_PASS, gpu_kernels
from penteract.ops.declarations.quantised.fp8 import scaled_linear, with_recipe
from penteract.ops.declarations.quantised.fp8_experts import scaled_experts
from penteract.ops.declarations.quantised.fp8_linear import FP8_LINEAR, with_kernels
from penteract.ops.declarations.wide_product import WIDE_PRODUCT, without_recipe
from penteract.ops.tape import Site

_RUNS = "penteract.engine"
_GROUPED = f"{_RUNS}.kernels.moe.grouped_experts"
_MOE_TRITON = f"{_RUNS}.kernels.triton.moe"
_FP8, _FP8_TRITON = f"{_RUNS}.kernels.quantised", f"{_RUNS}.kernels.triton.quantised"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op. All keep what the op keeps, so tapes, buffers and formulas do not depend on the choice.

    serves   (site, layout) -> its declaration there, a subclass of the op's; None: it does not serve this call
    kernels  device type -> "module:table", a `TorchKernel` for each op; devices not listed cannot run it
    takes    how tensors of a call must lie
    library  device types on which a library computes it, or the host reads numbers: what it allocates is as declared
    """

    name: str
    serves: Serves
    kernels: Mapping[str, str]
    takes: Takes = anything
    library: tuple[str, ...] = ()

    def emulated(self, device: str) -> bool:
        """Whether this type of device only emulates it, in more memory than it declares."""
        return self.kernels[device].endswith(":EMULATED")


class Op(NamedTuple):
    """`implementations`: the first that serves a call computes it. The last is the reference, which serves every
    call."""

    declaration: OpDeclaration
    implementations: tuple[Implementation, ...]


def is_attention_backward(op_name: str, phase: str) -> bool:
    """Whether this phase of the op is a backward pass of attention: the place for a reduction (`step/fsdp.py`)."""
    return phase == "input_gradient" and OPS[op_name].declaration.part == "attention"


def implementation(site: Site, layout: Layout) -> tuple[Implementation, OpDeclaration]:
    """The implementation that computes a site under a layout, and its declaration there."""
    for one in OPS[site.op_name].implementations:
        if (declaration := one.serves(site, layout)) is not None:
            return one, declaration
    raise Bug("KERNEL", f"nothing computes {site}")


def declaration_of(site: Site, layout: Layout) -> OpDeclaration:
    """The declaration of the implementation that computes a site."""
    return implementation(site, layout)[1]


def _ops(declarations: Mapping[str, OpDeclaration], reference: str) -> dict[str, Op]:
    """The ops of one file, each with its reference implementation: plain torch, on any device."""
    table = f"{_RUNS}.kernels.{reference}"
    made = dict[str, Op]()
    for op_name, declaration in declarations.items():
        plain = Implementation(
            "reference", lambda site, layout, declaration=declaration: declaration, {"cpu": table, "cuda": table}
        )
        made[op_name] = Op(declaration, (*_KERNELS.get(op_name, ()), plain))
    return made


def _wide(op_name: str) -> Implementation:
    """Products whose weight gradients are summed straight into the bucket."""
    serves = without_recipe(WIDE_PRODUCT[op_name])
    return Implementation("wide_product", serves, {"cuda": f"{_RUNS}.kernels.wide_product:WIDE_PRODUCT"})


_FUSED_ATTENTION: tuple[tuple[AttentionKernel, type[FusedAttention], str], ...] = (
    ("fa4", Fa4Attention, "fused_attention.fa4:FA4"),
    ("fa4_documents", Fa4Documents, "fused_attention.fa4:FA4_DOCUMENTS"),
    ("cudnn", CudnnAttention, "fused_attention.cudnn:CUDNN"),
    ("flash", FlashAttention, "fused_attention.flash:FLASH"),
)


def _attention(over: Callable[[Serves], Serves]) -> tuple[Implementation, ...]:
    """The fused kernels that layouts ask for by name; `over`: how their registers lie."""
    return tuple(
        Implementation(
            name, over(when_chosen(name, kind)), {"cuda": f"{_RUNS}.kernels.{table}"}, aligned_rows, library=("cuda",)
        )
        for name, kind, table in _FUSED_ATTENTION
    )


def _one_pass(op_name: str) -> Implementation:
    """A kernel that goes over its tensors once."""
    table = f"{_RUNS}.kernels.triton.one_pass:ONE_PASS"
    return Implementation("triton", gpu_kernels(ONE_PASS[op_name]), {"cuda": table})


# FP8 products run in units that GPUs have; elsewhere they are emulated, with the same data and scales.
_KERNELS: Mapping[str, tuple[Implementation, ...]] = {
    **{op_name: (_one_pass(op_name),) for op_name in ONE_PASS},
    "attention": _attention(lambda serves: serves),
    **{
        name: (Implementation("triton", one_pass(name), {"cuda": f"{_RUNS}.kernels.triton.fusions:FUSIONS"}),)
        for name in ("fork_norm", "add_norm", "loss_and_gradient", "merged_linear", "packed_swiglu")
    },
    **{
        name: (
            Implementation(
                "quack", stored(name), {"cuda": f"{_RUNS}.kernels.fused_glu:QUACK"}, aligned_rows, library=("cuda",)
            ),
        )
        for name in GLU
    },
    "packed_attention": _attention(packed),
    "normed_attention": _attention(normed),
    **{
        name: (
            Implementation(
                "fp8", with_kernels(name, "reference"),
                {"cuda": f"{_FP8}.fp8_linear:FP8", "cpu": f"{_FP8}.fp8_linear:EMULATED"},
            ),
            Implementation(
                "fp8_triton", with_kernels(name, "triton"),
                {"cuda": f"{_FP8_TRITON}.fp8_linear:FP8_LINEAR"},
            ),
        )
        for name in FP8_LINEAR
    },
    "linear": (
        Implementation(
            "fp8", with_recipe(scaled_linear, "reference"),
            {"cuda": f"{_FP8}.fp8:FP8", "cpu": f"{_FP8}.fp8:EMULATED"},
        ),
        Implementation("fp8_triton", with_recipe(scaled_linear, "triton"), {"cuda": f"{_FP8_TRITON}.fp8:FP8"}),
        _wide("linear"),
    ),
    "logits": (_wide("logits"),),
    "router": (Implementation("triton", narrow_router, {"cuda": f"{_MOE_TRITON}.router:ROUTER"}),),
    "expert_linear": (
        Implementation(
            "fp8", with_recipe(scaled_experts, "reference"),
            {"cuda": f"{_FP8}.fp8_experts:FP8", "cpu": f"{_FP8}.fp8_experts:EMULATED"},
        ),
        Implementation("fp8_triton", with_recipe(scaled_experts, "triton"),
        {"cuda": f"{_FP8_TRITON}.fp8:FP8"}),
        Implementation(
            "grouped", by_groups("grouped"),
            {"cuda": f"{_MOE_TRITON}.expert_sums:GROUPED", "cpu": f"{_GROUPED}:EMULATED"}, aligned_rows, ("cpu",),
        ),
        Implementation("quack", by_groups("quack"), {"cuda": f"{_GROUPED}:QUACK"}, aligned_rows, library=("cuda",)),
    ),
    "expert_pair": (
        Implementation("quack", in_pairs, {"cuda": f"{_GROUPED}:QUACK"}, aligned_rows, library=("cuda",)),
    ),
}  # fmt: skip

OPS: dict[str, Op] = (
    _ops(DENSE, "dense:DENSE")
    | _ops(ATTENTION, "attention:ATTENTION")
    | _ops(LOSS, "loss:LOSS")
    | _ops(EXPERTS, "moe.experts:EXPERTS")
    | _ops(PADDED_ROWS, "moe.padded_rows:PADDED_ROWS")
    | _ops(BLOCKS, "moe.blocks:BLOCKS")
    | _ops(BALANCE, "moe.balance:BALANCE")
    | _ops(FUSIONS, "fusions:FUSIONS")
    | _ops(GLU, "glu:GLU")
    | _ops(NORMED_ATTENTION, "fused_attention.normed_attention:NORMED_ATTENTION")
    | _ops(FP8_LINEAR, "quantised.fp8_linear:EMULATED")
)

# Ops on registers with room for rows that the host does not count -> the op that each is recorded as (`ops/fuse.py`).
WITH_ROOM: Mapping[str, str] = {**PADDED, **IN_BLOCKS}

"""Which bodies a layout may have: what the kernels of GPUs can do, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penteract.errors import BadInput
from penteract.spec.layout import AttentionBody, ContextMethod, Elementwise, Layout
from penteract.spec.model import ModelSpec
from penteract.spec.precision import Policy

KERNEL_DTYPES = ("bf16", "fp16")  # that fused attention computes in
# Fastest first. cuDNN's takes whole sequences; the flash kernel takes documents that share them, and windows.
_ABLE: Mapping[AttentionBody, tuple[ContextMethod, ...]] = {"cudnn": ("exchange",), "flash": ("gather", "exchange")}
_WIDEST: Mapping[AttentionBody, int] = {"cudnn": 128, "flash": 256}


def kernel_breaches(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """(axis, what is wrong), as in `spec.rules`."""
    kernel, size = layout.attention, model.head_size
    if kernel not in _ABLE:
        return
    if layout.cp > 1 and layout.context_method not in _ABLE[kernel]:
        yield "context_method", f"the attention kernel '{kernel}' needs keys in the order of the sequence"
    if size % 8 or size > _WIDEST[kernel]:
        yield "attention", f"the kernel '{kernel}' takes heads in multiples of 8 to {_WIDEST[kernel]}, not {size}"
    if model.latent and model.latent.value_size != size:
        yield (
            "attention",
            f"the kernel '{kernel}' takes values as wide as keys, not {model.latent.value_size} for {size}",
        )
    if kernel == "cudnn" and model.sliding_window:
        yield "attention", f"the kernel 'cudnn' has no window, and this model's is {model.sliding_window}"


def check_elementwise(elementwise: Elementwise, p: Policy, *, where: str, fix: str) -> None:
    """Refuse kernels that do not compute as a policy does."""
    if elementwise == "triton" and p.stat != "fp32":
        raise BadInput("KERNEL", "the kernels of what is done element by element compute in fp32", where=where,
                       found=f"updates in {p.stat}", allowed="fp32", fix=fix)  # fmt: skip


def fastest_elementwise(p: Policy) -> Elementwise:
    """On a GPU."""
    return "triton" if p.stat == "fp32" else "reference"


def fastest_attention(model: ModelSpec, cp: int, method: ContextMethod) -> AttentionBody:
    """The fastest body that these may have on a GPU in 16 bits."""
    for kernel in _ABLE:
        if not any(kernel_breaches(model, Layout(cp=cp, context_method=method, attention=kernel))):
            return kernel
    return "reference"

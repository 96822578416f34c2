"""Limits of GPU kernels: which of them a layout may choose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from penteract.config.layout import (
    EVERY_FUSION,
    FUSIONS,
    AttentionKernel,
    CpMethod,
    Elementwise,
    Fusion,
    Layout,
)
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import Policy
from penteract.errors import BadInput


def most_documents(tokens: int) -> int:
    """The most documents that may share so many query tokens: the flash kernel is launched for this many."""
    return min(tokens, max(16, tokens // 64))


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLimits:
    """Limits of a fused attention kernel. Head sizes must be multiples of 8.

    context    the `cp_method`s that it supports
    widest     the largest head size
    window     whether it supports sliding windows
    documents  query tokens -> how many documents may share them; None: only one document per sequence
    package    what it needs in addition to torch: its name, and the version whose private functions are called
    capability the compute capability of the GPUs that it is written for; None: any
    repeats    whether it has a backward pass that was seen to have the same bits whenever it is called
    """

    context: tuple[CpMethod, ...]
    widest: int
    window: bool
    documents: Callable[[int], int] | None = None
    device: str = "cuda"
    computes: tuple[str, ...] = ("bf16", "fp16")
    package: tuple[str, str] | None = None
    module: str = ""
    capability: tuple[int, int] | None = None
    repeats: bool = False


FA4 = ("flash-attn-4", "4.0.0b36")
QUACK = ("quack-kernels", "0.6.5")
MULTIPLE = 8  # of 16-bit numbers in a row: products of packages load them 16 bytes at a time
HOPPER = (9, 0)  # tiles, and so what it allocates, differ on other GPUs

_FA4 = KernelLimits(
    context=("ulysses",), widest=128, window=True, package=FA4, module="flash_attn.cute.interface", capability=HOPPER,
    repeats=True,
)  # fmt: skip
# Fastest first.
ATTENTION: Mapping[AttentionKernel, KernelLimits] = {
    "fa4": _FA4,
    "fa4_documents": replace(_FA4, context=("all_gather", "ulysses"), documents=most_documents),
    "cudnn": KernelLimits(context=("ulysses",), widest=128, window=False),
    "flash": KernelLimits(context=("all_gather", "ulysses"), widest=256, window=True, documents=most_documents),
}


def kernel_breaches(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong), as in `config/rules/breaches.py`."""
    kernel, size = layout.attention, model.head_size
    if (can := ATTENTION.get(kernel)) is None:
        return
    if layout.cp > 1 and layout.cp_method not in can.context:
        yield "cp_method", f"the attention kernel '{kernel}' needs keys in the order of the sequence"
    if size % 8 or size > can.widest:
        yield "attention", f"the kernel '{kernel}' takes heads in multiples of 8 to {can.widest}, not {size}"
    if model.latent and model.latent.value_size != size:
        yield (
            "attention",
            f"the kernel '{kernel}' takes values as wide as keys, not {model.latent.value_size} for {size}",
        )
    if model.sliding_window and not can.window:
        yield "attention", f"the kernel '{kernel}' has no window, and this model's is {model.sliding_window}"
    if layout.determinism == "bitwise" and not can.repeats:
        yield "attention", f"the kernel '{kernel}' adds gradients in any order, and determinism is bitwise"


def takes_documents(kernel: AttentionKernel) -> bool:
    """Whether several documents may share a sequence."""
    return kernel not in ATTENTION or ATTENTION[kernel].documents is not None


def check_elementwise(elementwise: Elementwise, p: Policy, *, where: str, fix: str) -> None:
    """Refuse Triton kernels under a policy whose updates are not in fp32."""
    if elementwise == "triton" and p.stat != "fp32":
        raise BadInput("KERNEL", "element-wise Triton kernels compute in fp32", where=where,
                       found=f"updates in {p.stat}", allowed="fp32", fix=fix)  # fmt: skip


def fastest_elementwise(p: Policy) -> Elementwise:
    """The fastest elementwise kernels on a GPU that this policy allows."""
    return "triton" if p.stat == "fp32" else "reference"


def installed_packages(*wanted: tuple[str, str]) -> frozenset[str]:
    """Those of these packages that are installed in the version that is called."""
    return frozenset(name for name, version in wanted if installed_version(name) == version)


def installed_version(package: str) -> str:
    """The version of a package that is installed, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def fastest_attention(
    model: ModelSpec,
    layout: Layout,
    p: Policy,
    packages: Collection[str] = (),
    *,
    capability: tuple[int, int] = HOPPER,
    documents: bool = False,
) -> AttentionKernel:
    """The fastest that a layout may have on a GPU of a compute capability, with torch and `packages`. `documents`:
    whether they share sequences."""
    for kernel, can in ATTENTION.items():
        if p.compute not in can.computes or (can.package and can.package[0] not in packages):
            continue
        if (can.capability and can.capability != capability) or (documents and can.documents is None):
            continue
        if not any(kernel_breaches(model, layout.put(attention=kernel))):
            return kernel
    return "reference"


# ---- the fusion glu --------------------------------------------------------------------------------------------------

GLU_COMPUTES = ("bf16", "fp16")


def glu_breaches(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong), as in `rules`."""
    if "glu" not in layout.fuse or layout.elementwise == "reference":
        return
    for name, size in _sizes(model, layout):
        if size % MULTIPLE:
            yield "fuse", f"the fusion 'glu' takes rows of a multiple of {MULTIPLE}, and {name} is {size}"


def fastest_fusions(
    model: ModelSpec, layout: Layout, p: Policy, packages: Collection[str] = (), *, capability: tuple[int, int] = HOPPER
) -> tuple[Fusion, ...]:
    """The fusions that a layout may have on a GPU of a compute capability, with torch, Triton and `packages`."""
    plain = p.fp8 is None and p.compute in GLU_COMPUTES and model.activation == "swiglu"
    fits = plain and not any(size % MULTIPLE for _, size in _sizes(model, layout))
    return EVERY_FUSION if fits and QUACK[0] in packages and capability == HOPPER else FUSIONS


def has_glu(model: ModelSpec) -> bool:
    """Whether the fusion 'glu' finds a gated MLP that is no expert's. Of experts it pairs the products, if they are
    quack's."""
    shared = model.moe is not None and model.moe.shared_ffn_size > 0
    return model.activation == "swiglu" and (shared or not all(map(model.has_experts, range(model.layers))))


def _sizes(model: ModelSpec, layout: Layout) -> tuple[tuple[str, int], ...]:
    shared = model.moe.shared_ffn_size if model.moe else 0  # 0: none, and a multiple of all
    return (
        ("hidden_size", model.hidden_size),
        ("the ffn_size on a rank", model.ffn_size // layout.tp),
        ("the shared_ffn_size on a rank", shared // layout.tp),
    )

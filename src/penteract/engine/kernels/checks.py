"""Refuse layouts whose kernels cannot run on a device. A kernel is never silently replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec

import torch

from penteract.config.layout import AttentionKernel
from penteract.config.precision.policy import Policy
from penteract.config.rules.case import KEYS, Case
from penteract.config.rules.determinism import not_seen_to_repeat
from penteract.config.rules.expert_kernels import EXPERTS, fastest_experts
from penteract.config.rules.kernel_limits import (
    ATTENTION,
    GLU_COMPUTES,
    HOPPER,
    QUACK,
    KernelLimits,
    check_elementwise,
    kernel_breaches,
    takes_documents,
)
from penteract.config.rules.nearest import allowed_values
from penteract.config.rules.settle import Settle
from penteract.engine.data.token_sample import TokenSample
from penteract.engine.kernels.registry import Target, TargetHere, check_devices, computed_sites
from penteract.errors import BadInput, CorruptData
from penteract.ops.declarations.fused_attention.flash import query_tokens
from penteract.parallel import direct
from penteract.step.program import Program

log = logging.getLogger(__name__)
KEY = KEYS["attention"]
PLAIN = f"--{KEY} reference"


def check_kernels(p: Program, at: torch.device | Target, *, packed: bool) -> None:
    """Refuse a program that its kernels cannot run at a device. `packed`: documents share sequences."""
    device = TargetHere(at) if isinstance(at, torch.device) else at
    _check_fp8(p.precision, device, first=p.rank == 0)
    _check_elementwise(p, device)
    _check_attention(p, device, packed=packed)
    _check_experts(p, device)
    _check_glu(p, device)
    _check_collectives(p, device)
    _check_determinism(p, device)
    check_devices(p, device)


def _check_attention(p: Program, device: Target, *, packed: bool) -> None:
    kernel = p.layout.attention
    if (can := ATTENTION.get(kernel)) is None:
        return
    if device.type != can.device:
        raise _refusal(kernel, "is a GPU's", device.type, can.device)
    if p.precision.compute not in can.computes:
        able = ", ".join(can.computes)
        raise _refusal(kernel, "computes in 16 bits", p.precision.compute, able, f"--precision.dtype bf16, or {PLAIN}")
    case = Case(model=p.model, layout=p.layout, sequence_length=p.sequence_length)
    for setting, what in kernel_breaches(p.model, p.layout):
        able = allowed_values(case, setting, Settle())
        fix = dict.fromkeys([*(f"--{KEYS[setting]} {value}" for value in able[:1]), PLAIN])
        raise BadInput("KERNEL", what, where=KEYS[setting], found=case.get(setting), allowed=", ".join(able),
                       fix=", or ".join(fix))  # fmt: skip
    if packed and not takes_documents(kernel):
        able = [name for name, its in ATTENTION.items() if takes_documents(name) and its.package == can.package]
        other = "".join(f", or --{KEY} {name}" for name in able[:1])
        raise _refusal(kernel, "takes whole sequences", "documents that share them", "data.pack_documents false",
                       f"--data.pack_documents false{other}")  # fmt: skip
    torchs = "flash" if takes_documents(kernel) else "cudnn"
    _check_installed(kernel, can, device, torchs if p.layout.determinism == "off" else "reference")


def _check_installed(kernel: AttentionKernel, can: KernelLimits, device: Target, other: AttentionKernel) -> None:
    """A kernel of another package is called below its public functions: it is that of one version, for some GPUs."""
    if can.package is not None:
        name, wanted = can.package
        if (version := device.installed(name)) != wanted:
            found = f"{name} {version}" if version else f"a python without {name}"
            fix = f"pip install '{name}=={wanted}' (as 'penteract[gpu]' does), or --{KEY} {other}"
            raise _refusal(kernel, "is of another package", found, f"{name} {wanted}", fix)
    if can.capability is not None and (on := device.capability) != can.capability:
        raise _refusal(kernel, "is for Hopper", f"compute capability {on[0]}.{on[1]}", "9.0",
                       f"--{KEY} cudnn, or {PLAIN}")  # fmt: skip


def _check_experts(p: Program, device: Target) -> None:
    """A CPU emulates what has no device of its own."""
    kernel, key = p.layout.experts, KEYS["experts"]
    can = EXPERTS.get(kernel)
    if can is None or p.model.moe is None or not (can.device or device.type == "cuda"):
        return
    version = device.capability
    other = fastest_experts(p.model, p.layout, p.precision, capability=version)  # of torch
    computes, fix = p.precision.compute, f"--{key} {other}"
    name, wanted = can.package or ("torch", "")
    here = device.installed(name) if wanted else wanted
    needs = (
        (device.type == "cuda", device.type, "cuda"),
        (computes in can.computes, computes, ", ".join(can.computes)),
        (version == (can.capability or version) and version >= can.least, f"compute capability {version}", "9.0"),
        (here == wanted, f"{name} {here}" if here else f"a python without {name}", f"{name} {wanted}"),
    )
    for holds, found, allowed in needs:
        if not holds:
            raise BadInput("KERNEL", f"the experts' kernel '{kernel}' does not run here", where=key, found=found,
                           allowed=allowed, fix=fix)  # fmt: skip


def _check_glu(p: Program, device: Target) -> None:
    """Triton's kernels go with a product of another package."""
    if p.layout.elementwise == "reference" or not any(site.op_name == "merged_glu" for site in computed_sites(p)):
        return
    key, (name, wanted) = KEYS["fuse"], QUACK
    version = device.capability
    computes, here = p.precision.compute, device.installed(name)
    needs = (
        (version == HOPPER, f"compute capability {version[0]}.{version[1]}", "9.0"),
        (computes in GLU_COMPUTES, computes, ", ".join(GLU_COMPUTES)),
        (here == wanted, f"{name} {here}" if here else f"a python without {name}", f"{name} {wanted}"),
    )
    for holds, found, allowed in needs:
        if not holds:
            raise BadInput("KERNEL", "the fusion 'glu' does not run here", where=key, found=found, allowed=allowed,
                           fix=f"--{key} all")  # fmt: skip


def _check_collectives(p: Program, device: Target) -> None:
    """Ranks of a host can read each other's memory, if the layout wants it."""
    lay, key = p.layout, KEYS["collectives"]
    if not direct.axes(lay) or device.reads_peers:
        return
    raise BadInput("DEVICE", "ranks of this host cannot read each other's memory", where=key, found=lay.collectives,
                   allowed="library; others where GPUs have peer access, or on Linux",
                   fix=f"--{key} library")  # fmt: skip


def _check_determinism(p: Program, device: Target) -> None:
    """A GPU has kernels that were seen to repeat to the bit, on such a GPU. On a CPU all do."""
    if p.layout.determinism == "off" or device.type != "cuda":
        return
    for setting, found, allowed in not_seen_to_repeat(p.model, p.layout, device.capability):
        fixes = dict.fromkeys([f"--{KEYS[setting]} {allowed[0]}", f"--{KEYS['determinism']} off"])
        raise BadInput("KERNEL", "not seen to repeat to the bit", where=KEYS[setting], found=found,
                       allowed=", ".join(allowed), fix=", or ".join(fixes))  # fmt: skip


def _check_elementwise(p: Program, device: Target) -> None:
    key = KEYS["elementwise"]
    if p.layout.elementwise == "reference":
        return
    if device.type != "cuda":
        found, allowed = device.type, "cuda"
    elif find_spec("triton") is None:
        found, allowed = "a python without triton", "triton"
    else:
        check_elementwise(p.layout.elementwise, p.precision, where=key, fix=f"--{key} reference")
        return
    raise BadInput("KERNEL", "element-wise kernels are in Triton and need a GPU", where=key, found=found,
                   allowed=allowed, fix=f"--{key} reference")  # fmt: skip


def _check_fp8(policy: Policy, device: Target, *, first: bool) -> None:
    """Refuse FP8 recipes that this GPU or torch does not support. On a CPU FP8 is emulated, with a warning."""
    fp8 = policy.fp8
    if fp8 is None:
        return
    if device.type != "cuda":
        if first:
            log.warning("FP8 is emulated on this device: its values and scales are those of a GPU, its speed is not")
        return
    least = (9, 0) if fp8.kind in ("rowwise", "blockwise") else (8, 9)
    version = device.capability
    if version < least or (fp8.kind == "blockwise" and version[0] != 9):
        raise BadInput("FP8", f"this GPU has no units for {fp8.kind} FP8", where="precision.dtype",
                       found=f"{device.name}, compute capability {version[0]}.{version[1]}",
                       allowed="9.0" if fp8.kind == "blockwise" else f"{least[0]}.{least[1]} or more",
                       fix="--precision.dtype bf16" + (", or fp8_tensorwise" if version >= (8, 9) else ""))  # fmt: skip
    if fp8.kind == "blockwise" and device.cuda < (12, 9):
        raise BadInput("FP8", "this torch cannot multiply blockwise FP8", where="precision.dtype",
                       found="CUDA {}.{}".format(*device.cuda), allowed="12.9 or more",
                       fix="--precision.dtype fp8_tensorwise")  # fmt: skip
    if fp8.kind == "blockwise" and (fp8.block != 128 or "e5m2" in (fp8.operand, fp8.gradient)):
        raise BadInput("FP8", "kernels support only blocks of 128 in e4m3", where="precision.fp8_block",
                       found=f"{fp8.block}, {fp8.operand} and {fp8.gradient}", allowed="128, e4m3",
                       fix="--precision.fp8_block 128 --precision.fp8_gradient e4m3")  # fmt: skip
    if policy.compute != "bf16":
        raise BadInput("FP8", "on a GPU, the other tensors must be bf16", where="precision.dtype", found=policy.name,
                       allowed="a recipe of FP8", fix=f"--precision.dtype fp8_{fp8.kind}")  # fmt: skip


def check_documents(p: Program, samples: Iterable[TokenSample]) -> None:
    """Refuse a sequence with more documents than the kernel supports. Checked on the host, before the copy to the
    device."""
    lay, s = p.layout, p.sequence_length
    can = ATTENTION.get(lay.attention)
    if can is None or can.documents is None:
        return
    own = s if lay.cp_method == "ulysses" else s // lay.cp
    n = query_tokens(own, s)
    most = can.documents(n)
    for sample in samples:
        start = torch.as_tensor(sample.start)
        found = _most(start.unflatten(0, (-1, n)))
        if found > most:
            raise CorruptData("DOCUMENTS", f"the attention kernel '{lay.attention}' takes few documents in {n} tokens",
                              where=KEY, found=found, allowed=f"<= {most}",
                              fix=f"--data.pack_documents false, or {PLAIN}")  # fmt: skip


def _most(start: torch.Tensor) -> int:
    """start [chunks, n] -> the largest number of documents in a chunk."""
    return 1 + int((start[:, 1:] != start[:, :-1]).sum(1).max())


def _refusal(kernel: str, what: str, found: str, allowed: str, fix: str = PLAIN) -> BadInput:
    return BadInput(
        "KERNEL", f"the attention kernel '{kernel}' {what}", where=KEY, found=found, allowed=allowed, fix=fix
    )

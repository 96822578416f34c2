"""Which bodies a layout runs, and what their kernels cannot do: refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from penteract.engine.bodies import cudnn, flash, reference
from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.dense import DENSE
from penteract.engine.bodies.fp8 import by_recipe, emulated, real, scaled
from penteract.engine.feed import Sample
from penteract.errors import BadInput
from penteract.ops.bodies.flash import most_documents, piece
from penteract.spec import case as spec_case
from penteract.spec.kernels import kernel_breaches
from penteract.spec.layout import Layout
from penteract.spec.nearest import allowed_values
from penteract.spec.settle import Settle
from penteract.step.program import Program

KEY = spec_case.AXES["attention"]
PLAIN = f"--{KEY} reference"


def bodies(layout: Layout, device: torch.device) -> dict[str, TorchBody]:
    """The body of every word under a layout."""
    kernels: Mapping[str, dict[str, TorchBody]] = {"reference": {}, "flash": flash.FLASH, "cudnn": cudnn.CUDNN}
    linear = by_recipe(DENSE["linear"], scaled(real if device.type == "cuda" else emulated))
    return reference.REFERENCE | {"linear": linear} | kernels[layout.attention]


def check_kernels(p: Program, device: torch.device, *, packed: bool) -> None:
    """Refuse a program that its kernels cannot run. `packed`: documents share sequences."""
    kernel = p.layout.attention
    if kernel == "reference":
        return
    if device.type != "cuda":
        raise _refusal(kernel, "is a GPU's", device.type, "cuda")
    if p.precision.compute != "bf16":
        raise _refusal(kernel, "computes in bf16", p.precision.compute, "bf16", f"--precision.dtype bf16, or {PLAIN}")
    case = spec_case.Case(model=p.model, layout=p.layout, sequence_length=p.sequence_length)
    for axis, what in kernel_breaches(p.model, p.layout):
        able = allowed_values(case, axis, Settle())
        fix = dict.fromkeys([*(f"--{spec_case.AXES[axis]} {value}" for value in able[:1]), PLAIN])
        raise BadInput("KERNEL", what, where=spec_case.AXES[axis], found=case.get(axis), allowed=", ".join(able),
                       fix=", or ".join(fix))  # fmt: skip
    if kernel == "cudnn" and packed:
        raise _refusal(kernel, "takes whole sequences", "documents that share them", "data.pack_documents false",
                       f"--data.pack_documents false, or --{KEY} flash")  # fmt: skip


def check_documents(p: Program, samples: Iterable[Sample]) -> None:
    """Refuse a sequence with more documents than the kernel is started for: seen on the host, before it is sent."""
    lay, s = p.layout, p.sequence_length
    if lay.attention != "flash":
        return
    own = s if lay.context_method == "exchange" else s // lay.cp
    n = piece(own, s)
    most = most_documents(n)
    for sample in samples:
        start = torch.as_tensor(sample.start)
        found = _most(start.unflatten(0, (-1, n)))
        if found > most:
            raise _refusal("flash", f"takes few documents in {n} tokens of a sequence", str(found), f"<= {most}",
                           f"--data.pack_documents false, or {PLAIN}")  # fmt: skip


def _most(start: torch.Tensor) -> int:
    """start [chunks, n] -> documents of the chunk that has the most."""
    return 1 + int((start[:, 1:] != start[:, :-1]).sum(1).max())


def _refusal(kernel: str, what: str, found: str, allowed: str, fix: str = PLAIN) -> BadInput:
    return BadInput(
        "KERNEL", f"the attention kernel '{kernel}' {what}", where=KEY, found=found, allowed=allowed, fix=fix
    )

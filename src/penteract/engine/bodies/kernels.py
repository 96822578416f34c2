"""Which bodies a layout runs, and what their kernels cannot do: refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from penteract.engine.bodies import cudnn, flash, reference
from penteract.engine.bodies.body import TorchBody
from penteract.engine.feed import Sample
from penteract.errors import BadInput
from penteract.ops.bodies.flash import most_documents, piece
from penteract.ops.tape import Site
from penteract.spec.layout import Layout
from penteract.step.program import Program

KEY = "kernels.attention"
PLAIN = f"--{KEY} reference"


def bodies(layout: Layout) -> dict[str, TorchBody]:
    """The body of every word under a layout."""
    kernels: Mapping[str, dict[str, TorchBody]] = {"reference": {}, "flash": flash.FLASH, "cudnn": cudnn.CUDNN}
    return reference.REFERENCE | kernels[layout.attention]


def check_kernels(p: Program, device: torch.device, *, packed: bool) -> None:
    """Refuse a program that its kernels cannot run. `packed`: documents share sequences."""
    kernel = p.layout.attention
    if kernel == "reference":
        return
    if device.type != "cuda":
        raise _refusal(kernel, "is a GPU's", device.type, "cuda")
    if p.precision.compute != "bf16":
        raise _refusal(kernel, "computes in bf16", p.precision.compute, "bf16", f"--precision.dtype bf16, or {PLAIN}")
    sites = (op.site for c in p.chunks for op in c.tape.ops if op.site.word == "attention")
    for refusal in (*_layout(p.layout, packed), *(r for site in sites for r in _heads(kernel, site))):
        raise refusal


def _layout(layout: Layout, packed: bool) -> Iterator[BadInput]:
    kernel, able = layout.attention, ("exchange",) if layout.attention == "cudnn" else ("gather", "exchange")
    if layout.cp > 1 and layout.context_method not in able:
        yield _refusal(kernel, "takes keys in the order of the sequence", f"context method {layout.context_method}",
                       ", ".join(able), f"--parallel.context_method {able[0]}, or {PLAIN}")  # fmt: skip
    if kernel == "cudnn" and packed:
        yield _refusal(kernel, "takes whole sequences", "documents that share them", "data.pack_documents false",
                       f"--data.pack_documents false, or --{KEY} flash")  # fmt: skip


def _heads(kernel: str, site: Site) -> Iterator[BadInput]:
    size, value_size = (int(site.attrs[n]) for n in ("head_size", "value_size"))
    largest = 128 if kernel == "cudnn" else 256
    if size % 8 or size > largest:
        yield _refusal(kernel, "takes other heads", f"head size {size}", f"multiples of 8 to {largest}")
    if size != value_size:
        yield _refusal(kernel, "takes values as wide as keys", f"{value_size} and {size}", "equal sizes")
    if kernel == "cudnn" and site.attrs["window"]:
        yield _refusal(kernel, "has no window", f"a window of {site.attrs['window']}", "0", f"--{KEY} flash")


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

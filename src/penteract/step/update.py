"""What an optimizer keeps of a shard, and what AdamW allocates, reads and writes: bytes, the same for either price.

Roles narrower than the update's own dtype are widened a slice at a time, so what that takes has a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penteract.config.layout import Elementwise
from penteract.config.optimizers import ADAMW, OptimizerKind
from penteract.config.precision.policy import BLOCK, BYTES, Policy
from penteract.parallel.data import Bucket
from penteract.units import Bytes

SLICE = 2**22  # elements; whole blocks. A pass over as many takes a GPU longer than the launch of its kernel
STAGING = 3  # on the device, of what is kept on the host: one slice comes, one is moved, one leaves
INDEX = 4  # bytes of a code while it is looked up
RANDOM_BITS = 16  # bytes an element of random bits while they are mixed


def kept(elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW, *, scaled: bool = False) -> Bytes:
    """Between steps: a master where there is one, the optimizer's moments, and the scales of their blocks, for which
    there is room too where they are `scaled`."""
    room = len(optimizer_kind.moments) * _scales(elements) if scaled and p.moments != "int8" else 0
    return sum(kept_apart(elements, p, optimizer_kind)) + room


def kept_apart(elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW) -> tuple[Bytes, ...]:
    """The same, of each buffer: the master, the moments, their scales."""
    n = len(optimizer_kind.moments)
    master = (elements * p.widths["master"],) if p.master else ()
    scales = (_scales(elements),) * n if p.moments == "int8" else ()
    return (*master, *[elements * p.widths["moment"]] * n, *scales)


def _scales(elements: int) -> Bytes:
    return elements // BLOCK * 4


def parts(elements: int) -> Iterator[slice]:
    """Slices of that many elements, in order: whoever widens what is kept does it by these."""
    return (slice(at, min(at + SLICE, elements)) for at in range(0, elements, SLICE))


def is_sliced(p: Policy) -> bool:
    """Whether anything is narrower than what updates are computed in."""
    return {p.gradient, p.moments, p.dtype("master")} != {p.stat}


@dataclass(frozen=True, slots=True)
class StagingBuffers:
    """The staging buffers on the device, which slices of what is on the host take in turns: how many, and the elements
    of each.

    p       has the widest moments of them
    scaled  some have scales
    """

    count: int
    elements: int
    p: Policy
    scaled: bool

    @property
    def each(self) -> Bytes:
        """Bytes of one staging buffer: master, moments and the room for their scales."""
        return kept(self.elements, self.p, scaled=self.scaled)


def staging_buffers(counted: Iterable[tuple[Bucket, int]], p: Policy) -> StagingBuffers:
    """Of buckets, and how many there are of each."""
    away = [(b, n) for b, n in counted if b.offloaded]
    slices = sum(-(-b.shard_size // SLICE) * n for b, n in away)
    widest = max((b.moments for b, _ in away), key=BYTES.__getitem__, default=p.moments)
    return StagingBuffers(
        min(STAGING, slices), max([min(b.shard_size, SLICE) for b, _ in away], default=0), p.keeping(widest),
        any(b.moments == "int8" for b, _ in away),
    )  # fmt: skip


def workspace(elements: int, p: Policy, elementwise: Elementwise = "reference", *, offloaded: bool = False) -> Bytes:
    """At the worst moment: one temporary of the shard's size, or the widened copies of a slice. What is kept on the
    host is moved by slices. A kernel moves each element in registers."""
    if elementwise == "triton":
        return 0
    wide, elements = p.widths["stat"], min(elements, SLICE) if offloaded else elements
    if not is_sliced(p):
        return elements * wide
    gradient, moment, master = (wide * (d != p.stat) for d in (p.gradient, p.moments, p.dtype("master")))
    code = INDEX if p.moments == "int8" else 0
    moments = max(gradient + 2 * moment, wide + 2 * moment) + code
    rounding = RANDOM_BITS if p.stochastic else 0
    return min(elements, SLICE) * max(moments, wide + master, master + rounding)


def wire_workspace(elements: int, p: Policy) -> Bytes:
    """Of a bucket's sum in another dtype than that of its gradients: a slice on its way from one to the other."""
    return min(elements, SLICE) * p.widths["gradient"] if p.reduce != p.gradient else 0


def bytes_moved(elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW) -> Bytes:
    """Read: the gradient (twice, for its norm too), the moments, the master. Written: all but the gradient, and the
    parameter where it is another."""
    w = p.widths
    moved = 2 * w["master"] + w["parameter"] if p.master else 2 * w["parameter"]
    return elements * (2 * w["gradient"] + moved) + 2 * (kept(elements, p, optimizer_kind) - elements * w["master"])

"""Bytes that an optimizer keeps for a shard, and that AdamW allocates, reads and writes; the same for either price.

Roles narrower than the update's own dtype are converted one slice at a time, so the workspace is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penteract.config.layout import Elementwise
from penteract.config.optimizers import ADAMW, OptimizerKind
from penteract.config.precision.policy import BYTES, MOMENT_BLOCK, Policy
from penteract.parallel.data import Bucket
from penteract.units import Bytes

SLICE = 2**22  # elements, in whole blocks. On a GPU a pass over so many takes longer than a kernel launch
STAGING = 3  # slices on the device of offloaded state: one is copied in, one is updated, one is copied out
INDEX = 4  # bytes of an index into the int8 table of values
RANDOM_BITS = 16  # bytes per element of random bits while they are mixed
PARTIAL_SUMS = 1056  # of squares, in fp32: programs of 256 threads that an H100 or H200 holds at once


def optimizer_state_bytes(
    elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW, *, scaled: bool = False
) -> Bytes:
    """Bytes kept between steps, in addition to the parameters: master weights, the optimizer's moments, and the scales
    of their blocks. With `scaled` there is room for scales in any case."""
    room = len(optimizer_kind.moments) * _scales(elements) if scaled and p.moments != "int8" else 0
    return sum(optimizer_buffers(elements, p, optimizer_kind)) + room


def optimizer_buffers(elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW) -> tuple[Bytes, ...]:
    """Bytes of each buffer of the optimizer state: master weights, moments, their scales."""
    n = len(optimizer_kind.moments)
    master = (elements * p.widths["master"],) if p.master else ()
    scales = (_scales(elements),) * n if p.moments == "int8" else ()
    return (*master, *[elements * p.widths["moment"]] * n, *scales)


def _scales(elements: int) -> Bytes:
    return elements // MOMENT_BLOCK * 4


def parts(elements: int, size: int = 0) -> Iterator[slice]:
    """The slices of so many elements, in order; by default those in which optimizer state is converted."""
    size = size or SLICE
    return (slice(at, min(at + size, elements)) for at in range(0, elements, size))


def is_sliced(p: Policy) -> bool:
    """Whether any state is converted to the dtype in which updates are computed."""
    return converts_master(p) or {p.gradient, p.moments} != {p.stat}


def converts_master(p: Policy) -> bool:
    """Whether what an update changes is a converted copy of the weights: they are narrower, or split."""
    return p.splits_master or p.dtype("master") != p.stat


@dataclass(frozen=True, slots=True)
class StagingBuffers:
    """Staging buffers on the device, used in turn by slices of offloaded optimizer state: their number, and the
    elements of each.

    p       a policy with the widest moments of all these buckets
    scaled  whether some of them have scales
    """

    count: int
    elements: int
    p: Policy
    scaled: bool

    @property
    def each(self) -> Bytes:
        """Bytes of one staging buffer: master weights, moments and room for their scales."""
        return optimizer_state_bytes(self.elements, self.p, scaled=self.scaled)


def staging_buffers(buckets_and_counts: Iterable[tuple[Bucket, int]], p: Policy) -> StagingBuffers:
    """The staging buffers for these buckets. `buckets_and_counts`: each bucket, and how many are equal to it."""
    away = [(b, n) for b, n in buckets_and_counts if b.offloaded]
    slices = sum(-(-b.shard_size // SLICE) * n for b, n in away)
    widest = max((b.moments for b, _ in away), key=BYTES.__getitem__, default=p.moments)
    return StagingBuffers(
        min(STAGING, slices), max([min(b.shard_size, SLICE) for b, _ in away], default=0), p.keeping(widest),
        any(b.moments == "int8" for b, _ in away),
    )  # fmt: skip


def workspace(elements: int, p: Policy, elementwise: Elementwise = "reference", *, offloaded: bool = False) -> Bytes:
    """Peak bytes: one temporary of the shard's size, or the converted copies of a slice. Offloaded state is updated in
    slices. A Triton kernel updates each element in registers and needs none."""
    if elementwise == "triton":
        return 0
    wide, elements = p.widths["stat"], min(elements, SLICE) if offloaded else elements
    if not is_sliced(p):
        return elements * wide
    gradient, moment, master = wide * (p.gradient != p.stat), wide * (p.moments != p.stat), wide * converts_master(p)
    index = INDEX if p.moments == "int8" else 0
    moments = max(gradient + 2 * moment, wide + 2 * moment) + index
    rounding = RANDOM_BITS if p.stochastic else 0
    return min(elements, SLICE) * max(moments, wide + master, master + rounding)


def norm_workspace(p: Policy, elementwise: Elementwise = "reference") -> Bytes:
    """Bytes of partial sums of squares, which are there from the first bucket of the gradients' norm to the last."""
    return PARTIAL_SUMS * p.widths["stat"] if one_pass_norm(p, elementwise) else 0


def one_pass_norm(p: Policy, elementwise: Elementwise) -> bool:
    """Whether a Triton kernel sums the squares of gradients: it does so in fp32."""
    return elementwise == "triton" and p.stat == "fp32"


def wire_workspace(elements: int, p: Policy) -> Bytes:
    """Bytes to reduce a bucket in another dtype than that of its gradients: one slice during the conversion."""
    return min(elements, SLICE) * p.widths["gradient"] if p.reduce != p.gradient else 0


def bytes_moved(elements: int, p: Policy, optimizer_kind: OptimizerKind = ADAMW) -> Bytes:
    """Bytes read: the gradient (twice, for its norm too), moments, master weights. Written: moments and master weights,
    and the parameter; it is read only if it is a part of them, or all there is."""
    w = p.widths
    moved = 2 * w["master"] + w["parameter"] * (1 if p.master and not p.splits_master else 2)
    return elements * (2 * w["gradient"] + moved) + 2 * (
        optimizer_state_bytes(elements, p, optimizer_kind) - elements * w["master"]
    )

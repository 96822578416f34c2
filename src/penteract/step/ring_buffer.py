"""Ring buffers for gathered parameters and unreduced gradients (ZeRO 2 and 3), and the entry of each bucket.

Units use the entries in turn, by number, so neighbouring units never share one: while a unit computes, the next one is
gathered into the other entry, and the last one's gradients are reduced from there. Addresses are the same in every
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penteract.config.layout import Layout
from penteract.config.precision.policy import Widths
from penteract.parallel.bucket_plans import NONE
from penteract.parallel.data import Bucket
from penteract.units import Bytes

DEPTH = 2


@dataclass(frozen=True, slots=True)
class RingBuffer:
    """`sizes`: bytes of each entry. `at`: bucket -> its entry, and its first byte in the entry."""

    sizes: tuple[int, ...] = ()
    at: Mapping[int, tuple[int, int]] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(self.sizes)

    def of(self, bucket: int) -> tuple[int, int]:
        """A bucket's entry, and its first byte in the entry."""
        assert self.at is not None
        return self.at[bucket]


def depth(layout: Layout, units: int) -> int:
    """The number of entries for a rank's parameters: one per unit if they stay gathered to the end of the step."""
    return units if layout.reshard_after_step else DEPTH


def count_units(buckets: Sequence[Bucket]) -> int:
    """The number of units of a rank's buckets, numbered from 0; some may have no bucket of their own."""
    return max((b.unit for b in buckets), default=NONE) + 1


def parameter_ring_buffer(buckets: Sequence[Bucket], layout: Layout, widths: Widths) -> RingBuffer:
    """The ring buffer into which parameters are gathered."""
    return _ring_buffer(buckets, [gathered_bytes(b, widths) for b in buckets], depth(layout, count_units(buckets)))


def gradient_ring_buffer(buckets: Sequence[Bucket], widths: Widths) -> RingBuffer:
    """The ring buffer in which gradients of one action accumulate until they are reduced over ranks."""
    return _ring_buffer(buckets, [summed_bytes(b, widths) for b in buckets], DEPTH)


def gathered_bytes(b: Bucket, widths: Widths) -> Bytes:
    """Bytes of a bucket in the parameter ring buffer."""
    return b.size * widths[b.gathered_as] if b.cut_parameters else 0


def summed_bytes(b: Bucket, widths: Widths) -> Bytes:
    """Bytes of a bucket in the gradient ring buffer."""
    return b.size * widths["gradient"] if b.cut_gradients else 0


def _ring_buffer(buckets: Sequence[Bucket], sizes: Sequence[Bytes], n: int) -> RingBuffer:
    filled: dict[int, Bytes] = {}  # of each unit
    at: dict[int, tuple[int, Bytes]] = {}
    for i, (b, size) in enumerate(zip(buckets, sizes, strict=True)):
        if size:
            at[i] = b.unit % n, filled.get(b.unit, 0)
            filled[b.unit] = filled.get(b.unit, 0) + size
    return RingBuffer(ring_buffer_sizes(filled, n), at)


def ring_buffer_sizes(filled: Mapping[int, int], n: int) -> tuple[int, ...]:
    """Bytes of each of `n` entries: those of its largest unit. `filled`: bytes by unit."""
    sizes = [0] * n
    for unit, size in filled.items():
        sizes[unit % n] = max(sizes[unit % n], size)
    return tuple(sizes)

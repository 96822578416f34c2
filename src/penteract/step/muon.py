"""What Muon asks for to move a bucket: wires, FLOPs and workspace, the same for every reading.

A bucket's momentum is gathered in the dtype of products, its matrices are dealt, made orthogonal, and summed back.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from penteract.config.precision.policy import BYTES, Policy
from penteract.parallel.data import Bucket
from penteract.parallel.matrix import Matrix, deal
from penteract.step import update
from penteract.units import Bytes, Flops

# Of the quintic a·x + b·x³ + c·x⁵: steep at zero, so that five steps bring all singular values near one.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Wire(NamedTuple):
    """A collective of an update; bytes as a ledger has them."""

    kind: str
    group: tuple[int, ...]
    amount: Bytes


def own(b: Bucket, rank: int) -> tuple[Matrix, ...]:
    """The matrices that `rank` makes orthogonal, in the order in which it does."""
    return deal(b.matrices, len(b.team))[b.team.index(rank)]


def products(m: Matrix) -> tuple[tuple[int, int, int], ...]:
    """Those of one step of Newton-Schulz, each [m, k]·[k, n] as (m, n, k): X·Xᵀ, its square, that times X."""
    short, long = sorted(m.shape)
    return (short, short, long), (short, short, short), (short, long, short)


def workspace_elements(b: Bucket) -> int:
    """Elements that a rank allocates beside the gathered bucket, whichever matrices it has: of the largest two products
    of its short side, the next iterate, and all of it where it is cut."""

    def one(m: Matrix) -> int:
        return 2 * min(m.shape) ** 2 + prod(m.shape) * (1 if m.cut < 0 else 2)

    return max((one(m) for m in b.matrices), default=0)


def wires(b: Bucket, some: tuple[Matrix, ...], p: Policy) -> Iterator[Wire]:
    """What a rank that has `some` of the matrices puts on wires: the bucket there, their slices over tp, and back."""
    width = BYTES[p.products]
    if b.shards > 1:
        yield Wire("all_gather", b.shard_ranks, b.size * width)
    if len(b.peers) > 1:
        yield from (Wire("all_gather", b.peers, prod(m.shape) * width) for m in some)
    if b.shards > 1:
        yield Wire("reduce_scatter", b.shard_ranks, b.size * width)
    elif len(b.replicate_ranks) > 1:
        yield Wire("all_reduce", b.replicate_ranks, b.size * width)


def flops(b: Bucket, some: tuple[Matrix, ...]) -> Flops:
    """Of a rank's matrices."""
    return b.optimizer_kind.steps * sum(2 * prod(p) for m in some for p in products(m))


def workspace(b: Bucket, p: Policy) -> Bytes:
    """At the worst moment: the bucket in the dtype of products, and a slice's widened copies or a matrix's room."""
    p = p.keeping(b.moments)
    wide, narrow = p.widths["stat"], BYTES[p.products]
    gradient, average, master, product = (
        wide * (d != p.stat) for d in (p.gradient, p.moments, p.dtype("master"), p.products)
    )
    code = update.INDEX if p.moments == "int8" else 0
    rounding = update.RANDOM_BITS if p.stochastic else 0
    slices = max(gradient + average + max(code, product), product + master, master + rounding)
    return b.size * narrow + max(workspace_elements(b) * narrow, min(b.shard_size, update.SLICE) * slices)


def bytes_moved(b: Bucket, p: Policy) -> Bytes:
    """What AdamW reads and writes, with one average; and the gathered bucket, written and read again."""
    return (
        update.bytes_moved(b.shard_size, p.keeping(b.moments), b.optimizer_kind) + 2 * b.shard_size * BYTES[p.products]
    )

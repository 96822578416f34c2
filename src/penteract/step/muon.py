"""Costs of a Muon update of a bucket: communication, FLOPs and workspace, the same for every reading.

A bucket's momentum is gathered in the dtype of products, its matrices are distributed over ranks, made orthogonal, and
summed back.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from penteract.config.layout import Elementwise
from penteract.config.precision.policy import BYTES, Policy
from penteract.parallel.data import Bucket
from penteract.parallel.matrix import Matrix, deal
from penteract.step import update
from penteract.units import Bytes, Flops

# Coefficients of a·x + b·x³ + c·x⁵: steep at zero, so that five steps bring all singular values near one.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Wire(NamedTuple):
    """A collective of an update. `amount`: its bytes, counted as in `ops/collectives.py`."""

    kind: str
    group: tuple[int, ...]
    amount: Bytes


def own(b: Bucket, rank: int) -> tuple[Matrix, ...]:
    """The matrices that `rank` makes orthogonal, in order."""
    return deal(b.matrices, len(b.team))[b.team.index(rank)]


def products(m: Matrix) -> tuple[tuple[int, int, int], ...]:
    """The products of one Newton-Schulz step, each [m, k]·[k, n] as (m, n, k): X·Xᵀ, its square, the square times X."""
    short, long = sorted(m.shape)
    return (short, short, long), (short, short, short), (short, long, short)


def workspace_elements(b: Bucket) -> int:
    """Elements that a rank allocates in addition to the gathered bucket, for any of its matrices: two products of the
    short side, the next iterate, and the whole matrix if it is sharded. The maximum over matrices."""

    def one(m: Matrix) -> int:
        return 2 * min(m.shape) ** 2 + prod(m.shape) * (1 if m.cut < 0 else 2)

    return max((one(m) for m in b.matrices), default=0)


def wires(b: Bucket, some: tuple[Matrix, ...], p: Policy) -> Iterator[Wire]:
    """The collectives of a rank with the matrices `some`: gather the bucket, gather their slices over tp, reduce
    back."""
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
    """FLOPs to make the matrices `some` orthogonal."""
    return b.optimizer_kind.steps * sum(2 * prod(p) for m in some for p in products(m))


def workspace(b: Bucket, p: Policy, elementwise: Elementwise = "reference") -> Bytes:
    """Peak bytes: the bucket in the dtype of products, and converted copies of a slice or the workspace of a matrix. A
    Triton kernel converts elements in registers."""
    narrow, slices = BYTES[p.products], 0 if elementwise == "triton" else _converted(p.keeping(b.moments))
    return b.size * narrow + max(workspace_elements(b) * narrow, min(b.shard_size, update.SLICE) * slices)


def _converted(p: Policy) -> Bytes:
    """Bytes of an element's converted copies, in the pass before or after matrices are made orthogonal."""
    wide = p.widths["stat"]
    gradient, average, product = (wide * (d != p.stat) for d in (p.gradient, p.moments, p.products))
    master = wide * update.converts_master(p)
    index = update.INDEX if p.moments == "int8" else 0
    rounding = update.RANDOM_BITS if p.stochastic else 0
    return max(gradient + average + max(index, product), product + master, master + rounding)


def bytes_moved(b: Bucket, p: Policy) -> Bytes:
    """Bytes that the passes over a shard read and write: those of AdamW with one moment, and what is made orthogonal,
    written by the first and read by the second."""
    moved = update.bytes_moved(b.shard_size, p.keeping(b.moments), b.optimizer_kind)
    return moved + b.shard_size * 2 * BYTES[p.products]


def passes(b: Bucket, some: tuple[Matrix, ...], p: Policy) -> Iterator[Bytes]:
    """Bytes that each pass over a matrix reads and writes beside its products, while a rank makes `some` of a bucket's
    matrices orthogonal."""
    narrow, mine = BYTES[p.products], {*some}
    for m in some:
        whole, own, short = prod(m.shape) * narrow, prod(m.local) * narrow, min(m.shape) ** 2 * narrow
        if m.cut == 1:
            yield 2 * whole  # columns are put side by side
        yield whole  # for its norm
        yield 2 * whole  # divided by it
        yield from (2 * short, 2 * whole) * b.optimizer_kind.steps  # what a product is added to is copied where it goes
        yield 2 * own  # scaled
    yield from (prod(m.local) * narrow for m in b.matrices if m not in mine)  # zeros

"""Distribution of a bucket's matrices over its ranks, for an optimizer that updates whole matrices (Muon).

Split      the matrices of a sharded bucket are distributed: the largest first, each to the rank with the least work. A
           tensor rank holds a slice of a matrix, and its peers hold the other slices.
Traffic    none here. An update gathers the bucket and, over tp, each of its own matrices; then it sums the results of
           all ranks, which are zero outside their own matrices.
Costs      twice the bucket in the dtype of products, and each matrix once over tp; tensor ranks repeat the same work.
Helps      when matrices are large; with more ranks than matrices in a bucket, some have none.
Papers     Jordan 2024 (kellerjordan.github.io/posts/muon); Liu 2025 (2502.16982) §2.3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from penteract.config.mesh import Mesh
from penteract.ops.params import Param


class Matrix(NamedTuple):
    """One matrix of a bucket; each expert's matrix is one.

    at     the offset of the rank's slice, in elements of the bucket
    local  rows and columns of that slice
    cut    the dim that is sharded over the peers; -1: the slice is the whole matrix
    peers  how many ranks have a slice
    """

    at: int
    local: tuple[int, int]
    cut: int = -1
    peers: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        rows, columns = self.local
        return rows * (self.peers if self.cut == 0 else 1), columns * (self.peers if self.cut == 1 else 1)

    @property
    def slice(self) -> range:
        """The rank's elements in the bucket."""
        return range(self.at, self.at + prod(self.local))

    @property
    def work(self) -> int:
        """Multiply-adds of its product with its own transpose: its weight when matrices are distributed."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)


def matrices(params: Sequence[Param], offsets: Sequence[int], mesh: Mesh) -> Iterator[Matrix]:
    """The matrices of parameters with equal sharding, in their order. The last two dims are those of a matrix."""
    for q, at in zip(params, offsets, strict=True):
        shape, first = q.local_shape(mesh), len(q.shape) - 2
        cuts = ((s.dim - first, s.num_shards(mesh)) for s in q.shards if s.axis == "tp" and s.num_shards(mesh) > 1)
        (rows, columns), cut = shape[first:], next(cuts, (-1, 1))
        for i in range(prod(shape[:first])):
            yield Matrix(at + i * rows * columns, (rows, columns), *cut)


def peers(params: Sequence[Param], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks of a tensor group with the slices of one matrix, one for each slice, in order."""
    group = mesh.group("tp", rank)
    num_shards = max((s.num_shards(mesh) for s in params[0].shards if s.axis == "tp"), default=1)
    each = len(group) // num_shards
    return group[group.index(rank) % each :: each] if num_shards > 1 else (rank,)


def deal(some: Sequence[Matrix], ranks: int) -> tuple[tuple[Matrix, ...], ...]:
    """The matrices of each rank: those with the most work first, to the rank with the least so far. In bucket order."""
    hands: list[list[Matrix]] = [[] for _ in range(ranks)]
    least = [(0, i) for i in range(ranks)]
    heapify(least)
    for m in sorted(some, key=lambda m: (-m.work, m.at)):
        load, i = least[0]
        hands[i].append(m)
        heapreplace(least, (load + m.work, i))
    return tuple(tuple(sorted(hand)) for hand in hands)

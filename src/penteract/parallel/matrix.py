"""Matrices of a bucket, dealt over the ranks that hold it, where each is to be seen as one (Muon).

Split      of a bucket whose elements are cut, the matrices are dealt: the largest first, to whoever has the least so
           far. What a tensor rank holds of a matrix is a slice, and its peers hold the others.
Traffic    none: an update gathers the bucket, its ranks' matrices one by one over tp, and sums what each has made of
           its own, zeros elsewhere.
Costs      twice the bucket in the dtype of products, and each matrix once over tp; every tensor rank computes alike.
Helps      where a matrix is much work; over more ranks than a bucket has matrices, some have none.
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
    """One matrix of a bucket; of several experts' each is one.

    at     where the rank's slice begins, in elements of the bucket
    local  rows and columns of that slice
    cut    the dim that is cut over the peers; -1: the slice is all of it
    peers  how many have a slice
    """

    at: int
    local: tuple[int, int]
    cut: int = -1
    peers: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of all of it."""
        rows, columns = self.local
        return rows * (self.peers if self.cut == 0 else 1), columns * (self.peers if self.cut == 1 else 1)

    @property
    def slice(self) -> range:
        """The rank's elements, in the bucket."""
        return range(self.at, self.at + prod(self.local))

    @property
    def work(self) -> int:
        """Multiply-adds of its product with its own transpose: what it weighs when matrices are dealt."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)


def matrices(params: Sequence[Param], offsets: Sequence[int], mesh: Mesh) -> Iterator[Matrix]:
    """Those of parameters that are cut alike, in their order. The last two dims are a matrix's."""
    for q, at in zip(params, offsets, strict=True):
        shape, first = q.local_shape(mesh), len(q.shape) - 2
        cuts = ((s.dim - first, s.pieces(mesh)) for s in q.shards if s.axis == "tp" and s.pieces(mesh) > 1)
        (rows, columns), cut = shape[first:], next(cuts, (-1, 1))
        for i in range(prod(shape[:first])):
            yield Matrix(at + i * rows * columns, (rows, columns), *cut)


def peers(params: Sequence[Param], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks with the slices of one matrix, in their order: those of a tensor group, one for each slice."""
    group = mesh.group("tp", rank)
    pieces = max((s.pieces(mesh) for s in params[0].shards if s.axis == "tp"), default=1)
    each = len(group) // pieces
    return group[group.index(rank) % each :: each] if pieces > 1 else (rank,)


def deal(some: Sequence[Matrix], ranks: int) -> tuple[tuple[Matrix, ...], ...]:
    """Whose matrix each is: the most work first, to the rank with the least so far. Each rank's, as they lie."""
    hands: list[list[Matrix]] = [[] for _ in range(ranks)]
    least = [(0, i) for i in range(ranks)]
    heapify(least)
    for m in sorted(some, key=lambda m: (-m.work, m.at)):
        load, i = least[0]
        hands[i].append(m)
        heapreplace(least, (load + m.work, i))
    return tuple(tuple(sorted(hand)) for hand in hands)

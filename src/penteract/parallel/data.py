"""Data parallelism.

Split      sequences; every rank of a group holds the same parameters. ZeRO stage 1 cuts what the optimizer keeps.
Seams      bucket   a flat buffer of gradients is summed over its holders as soon as its last writer has run, while
           backward goes on. No seam of the network reduces gradients.
           shard    under ZeRO the sum is a reduce-scatter: each holder gets its own equal part of the bucket, keeps
           optimizer state for that part alone, moves it, and an all-gather makes the parameters whole again.
Costs      every gradient once a step, hidden under the backward of earlier layers. ZeRO 1 puts no more on the wire: an
           all-reduce is both of its halves in one, and the second half is then in the parameters' own precision.
Helps      always, until the batch is as large as it may be; hurts when there is too little work to hide the traffic.
Papers     Li 2020 (2006.15704); Rajbhandari 2019 (1910.02054) §5.1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penteract.ops.params import Homes, Param, holders
from penteract.spec.mesh import Mesh

UNIT = 8  # elements: shards begin where a load of 16 bytes may, in bf16 too


_Alike = tuple[tuple[tuple[str, int], ...], tuple[int, ...], bool]  # how it is cut, its homes, whether it decays


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that live in one flat buffer. It is homogeneous: one group that must agree, one optimizer group.

    `shards`: equal parts into which the optimizer cuts it, one a holder, in their order; 1: each holder has all of it.
    Where they are several, the buffer ends in padding, zero from the start and zero after every update.
    """

    params: tuple[Param, ...]
    offsets: tuple[int, ...]  # in elements
    size: int  # in elements, with padding
    holders: tuple[int, ...]
    decay: bool
    across_stages: bool  # a parameter with several homes: summed after the last backward, as stages differ in order
    shards: int = 1

    @property
    def shard_size(self) -> int:
        """In elements, the same for every holder."""
        return self.size // self.shards

    def shard(self, rank: int) -> range:
        """The elements whose optimizer state `rank`, a holder, keeps."""
        at = self.holders.index(rank) * self.shard_size if self.shards > 1 else 0
        return range(at, at + self.shard_size)


def buckets(params: Iterable[Param], homes: Homes, mesh: Mesh, rank: int, width: int) -> tuple[Bucket, ...]:
    """`params` in the order in which backward finishes them -> flat buckets of about layout.bucket_bytes.

    Those with several homes come last, in the order of their names: stages hold them among different others, and must
    pack them alike and talk about them in one order. `width`: bytes of one gradient element.
    """
    limit = mesh.layout.bucket_bytes // width
    open_: dict[_Alike, list[tuple[Param, int]]] = {}  # with each one's elements
    full: dict[_Alike, int] = {}
    agree: dict[_Alike, tuple[int, ...]] = {}
    done: list[Bucket] = []

    def close(key: _Alike) -> None:
        group, offsets, at = open_.pop(key), list[int](), 0
        for _, n in group:
            offsets.append(at)
            at += n
        params, where = tuple(p for p, _ in group), key[1]
        if key not in agree:
            agree[key] = holders(params[0], where, mesh, rank)
        shards = len(agree[key]) if mesh.layout.zero else 1
        size = -(-at // (shards * UNIT)) * shards * UNIT if shards > 1 else at
        done.append(Bucket(params, tuple(offsets), size, agree[key], key[2], len(where) > 1, shards))

    known: dict[int, tuple[_Alike, int]] = {}  # by identity: layers that are alike may share their parameters
    for p in sorted(params, key=lambda q: (len(homes[q.name]) > 1) * q.name):
        if id(p) not in known:
            known[id(p)] = (p.cut(mesh), homes[p.name], p.decay), p.numel(mesh)
        key, n = known[id(p)]
        if key not in open_:
            open_[key], full[key] = [], 0
        open_[key].append((p, n))
        full[key] += n
        if full[key] >= limit:
            close(key)
    for key in list(open_):
        close(key)
    return tuple(done)

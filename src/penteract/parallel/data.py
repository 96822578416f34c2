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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penteract.ops.params import Homes, Param, holders
from penteract.spec.mesh import Mesh
from penteract.spec.precision import Policy

UNIT = 8  # elements: shards begin where a load of 16 bytes may, in bf16 too


Alike = tuple[tuple[tuple[str, int], ...], tuple[int, ...], bool]  # how it is cut, its homes, whether it decays


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that live in one flat buffer. It is homogeneous: one group that must agree, one optimizer group.

    `shards`: equal parts into which the optimizer cuts it, one a holder, in their order; 1: each holder has all of it.
    The buffer may end in padding, zero from the start and zero after every update.
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


@dataclass(frozen=True, slots=True)
class Pack:
    """Parameters that share a bucket, whoever holds it."""

    alike: Alike
    params: tuple[Param, ...]
    offsets: tuple[int, ...]
    elements: int

    def at(self, stage: int) -> Pack:
        """The same parameters of another pipeline rank, unless several share them."""
        cut, where, decay = self.alike
        return self if len(where) > 1 else replace(self, alike=(cut, (stage,), decay))


def packs(params: Iterable[Param], homes: Homes, mesh: Mesh, width: int) -> Iterator[Pack]:
    """`params` in the order in which backward finishes them -> groups of about layout.bucket_bytes.

    Those with several homes come last, in the order of their names: stages hold them among different others, and must
    pack them alike and talk about them in one order. `width`: bytes of one gradient element.
    """
    limit = mesh.layout.bucket_bytes // width
    open_: dict[Alike, tuple[list[Param], list[int]]] = {}  # with where each ends
    known: dict[int, tuple[Alike, int]] = {}  # by identity: layers that are alike may share their parameters

    def close(key: Alike) -> Pack:
        group, ends = open_.pop(key)
        return Pack(key, tuple(group), (0, *ends[:-1]), ends[-1])

    for p in sorted(params, key=lambda q: q.name if len(homes[q.name]) > 1 else ""):
        if id(p) not in known:
            known[id(p)] = (p.cut(mesh), homes[p.name], p.decay), p.numel(mesh)
        key, n = known[id(p)]
        if key in open_:
            group, ends = open_[key]
            group.append(p)
            ends.append(ends[-1] + n)
        else:
            open_[key] = group, ends = [p], [n]
        if ends[-1] >= limit:
            yield close(key)
    for key in list(open_):
        yield close(key)


def bucket_of(pack: Pack, mesh: Mesh, rank: int, grain: int = 1) -> Bucket:
    """The flat buffer of a pack on one rank. `grain`: elements that no shard ends within."""
    _, where, decay = pack.alike
    members = holders(pack.params[0], where, mesh, rank)
    shards = len(members) if mesh.layout.zero else 1
    each = shards * (max(UNIT, grain) if shards > 1 else grain)
    size = -(-pack.elements // each) * each
    return Bucket(pack.params, pack.offsets, size, members, decay, len(where) > 1, shards)


def buckets(params: Iterable[Param], homes: Homes, mesh: Mesh, rank: int, policy: Policy) -> tuple[Bucket, ...]:
    """The flat buckets of a rank, in the order in which they fill."""
    told = packs(params, homes, mesh, policy.widths["gradient"])
    return tuple(bucket_of(pack, mesh, rank, policy.grain) for pack in told)

"""Data parallelism.

Split      sequences; every rank of a group holds the same parameters.
Seams      bucket   a flat buffer of gradients is summed over its holders as soon as its last writer has run, while
           backward goes on. No seam of the network reduces gradients.
Costs      every gradient once a step, hidden under the backward of earlier layers.
Helps      always, until the batch is as large as it may be; hurts when there is too little work to hide the traffic.
Papers     Li 2020 (2006.15704); Rajbhandari 2019 (1910.02054)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penteract.ops.params import Homes, Param, holders
from penteract.spec.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that live in one flat buffer. It is homogeneous: one group that must agree, one optimizer group."""

    params: tuple[Param, ...]
    offsets: tuple[int, ...]  # in elements
    size: int
    holders: tuple[int, ...]
    decay: bool
    across_stages: bool  # a parameter with several homes: summed after the last backward, as stages differ in order


def buckets(params: Iterable[Param], homes: Homes, mesh: Mesh, rank: int, width: int) -> tuple[Bucket, ...]:
    """`params` in the order in which backward finishes them -> flat buckets of about layout.bucket_bytes.

    `width`: bytes of one gradient element.
    """
    limit = mesh.layout.bucket_bytes // width
    open_: dict[tuple[object, ...], list[Param]] = {}
    done: list[Bucket] = []

    def close(key: tuple[object, ...]) -> None:
        group, offsets, at = open_.pop(key), list[int](), 0
        for p in group:
            offsets.append(at)
            at += p.numel(mesh)
        where = homes[group[0].name]
        members = holders(group[0], where, mesh, rank)
        done.append(Bucket(tuple(group), tuple(offsets), at, members, group[0].decay, len(where) > 1))

    for p in params:
        where = homes[p.name]
        key = (p.cut(mesh), where, p.decay)
        open_.setdefault(key, []).append(p)
        if sum(q.numel(mesh) for q in open_[key]) >= limit:
            close(key)
    for key in list(open_):
        close(key)
    return tuple(done)

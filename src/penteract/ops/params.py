"""Parameters and their sharding: which dim is cut along which axis. Everything else is derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from penteract.config.mesh import Mesh

Cut = tuple[tuple[str, int], ...]  # the axes that cut a parameter, and into how many shards (at least two)


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is cut along `axis` into at most `parts` shards.

    If the axis has more ranks than shards (KV heads under a large tp), neighbouring ranks hold the same shard.
    """

    dim: int
    axis: str  # of `AXES` in config/mesh.py
    parts: int | None = None

    def num_shards(self, mesh: Mesh) -> int:
        """Into how many shards the dim is cut: one for each rank of the axis, at most `parts`."""
        n = mesh.size(self.axis)
        return n if self.parts is None else min(n, self.parts)

    def index(self, mesh: Mesh, rank: int) -> int:
        """Which shard `rank` holds."""
        n = mesh.size(self.axis)
        return mesh.index(self.axis, rank) // (n // self.num_shards(mesh))


@dataclass(frozen=True, slots=True)
class Param:
    """One global tensor: its shape, how it is sharded, how it is initialised, whether weight decay applies.

    `scale`: standard deviation of the normal initialisation; None: initialised to `fill`.
    `matrix`: its last two dims are a matrix between hidden states, not a table or a router: Muon may update it.
    `joined`: so many parameters, used right after it, lie behind it in one bucket: one product takes them all.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    scale: float | None = None
    fill: float = 0.0
    decay: bool = True
    matrix: bool = False
    joined: int = 0

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of what one rank holds: each cut dim is divided by its number of shards."""
        shape = list(self.shape)
        for s in self.shards:
            shape[s.dim] //= s.num_shards(mesh)
        return tuple(shape)

    def offset(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Where `rank`'s rectangle begins in the global tensor."""
        at, local = [0] * len(self.shape), self.local_shape(mesh)
        for s in self.shards:
            at[s.dim] = s.index(mesh, rank) * local[s.dim]
        return tuple(at)

    def cut(self, mesh: Mesh) -> Cut:
        """How it is cut, for `reduce_ranks`."""
        return tuple((s.axis, s.num_shards(mesh)) for s in self.shards if s.num_shards(mesh) > 1)

    def numel(self, mesh: Mesh) -> int:
        """Elements that one rank holds."""
        return prod(self.local_shape(mesh))


OwningPpRanks = Mapping[str, tuple[int, ...]]  # parameter name -> the pipeline ranks that hold it


def reduce_ranks(cut: Cut, owning_pp_ranks: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks that hold the same shard of a parameter as `rank`: they must agree on its gradient.

    Every rank has other tokens (dp, cp, and tp in the sequence-parallel region) or other heads, so a gradient is a
    partial sum over every axis that does not cut the parameter. No other rule decides which ranks reduce.
    """
    ranks = mesh.size("dp_cp_tp")
    places: Sequence[int] = range(ranks)
    for axis, num_shards in cut:
        block, stride = mesh.block(axis)
        each = block // stride // num_shards * stride  # neighbours that hold one shard; groups are nested
        begin = rank % block // each * each
        if len(places) == ranks:
            places = [at + i for at in range(begin, ranks, block) for i in range(each)]
        else:
            places = [place for place in places if begin <= place % block < begin + each]
    return tuple(pp * ranks + place for pp in owning_pp_ranks for place in places)

"""Where tokens lie that context ranks hold in zigzag, and their order in the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penteract.engine.kernels.kernel import Env
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """`chunks[i]`: which chunk of the sequence lies at place i. Where there is one chunk, nothing is copied."""

    chunks: tuple[int, ...] = (0,)

    @property
    def whole(self) -> bool:
        """Whether it lies in the order of the sequence already."""
        return len(self.chunks) == 1

    def restore(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """x as it lies -> in the order of the sequence."""
        if self.whole:
            return x
        parts = x.chunk(len(self.chunks), dim)
        return torch.cat([parts[self.chunks.index(c)] for c in range(len(parts))], dim)

    def put(self, y: torch.Tensor, into: torch.Tensor, dim: int = 0, end: int | None = None) -> None:
        """Write y, in the order of the sequence, as it should lie; zeros for tokens from `end` on."""
        size = into.shape[dim] // len(self.chunks)
        for place, c in enumerate(self.chunks):
            part = into.narrow(dim, place * size, size)
            if end is None or (c + 1) * size <= end:
                part.copy_(y.narrow(dim, c * size, size))
            else:
                part.zero_()

    def add(self, y: torch.Tensor, into: torch.Tensor, end: int) -> None:
        """Add what y has of tokens before `end`, along dim 0."""
        size = into.shape[0] // len(self.chunks)
        for place, c in enumerate(self.chunks):
            if (c + 1) * size <= end:
                into.narrow(0, place * size, size).add_(y.narrow(0, c * size, size))


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Query rows [at, at + tokens) are the sequence's tokens [first, first + tokens)."""

    at: int
    first: int
    tokens: int

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.first + self.tokens

    @property
    def rows(self) -> slice:
        """The query rows of the run."""
        return slice(self.at, self.at + self.tokens)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """How `attention` lies: the order of queries and of keys, and runs of query tokens that follow one another."""

    queries: ChunkOrder
    keys: ChunkOrder
    pieces: tuple[QueryRun, ...]

    @staticmethod
    def of(env: Env, site: Site) -> AttentionLayout:
        """By the context method: heads dealt (all tokens here), or keys gathered (own tokens against all)."""
        cp, s = env.mesh.layout.cp, int(site.ins[0].shape[0])  # type: ignore[arg-type]
        if cp == 1:
            return AttentionLayout(ChunkOrder(), ChunkOrder(), (QueryRun(0, 0, s),))
        dealt = ChunkOrder(tuple(c for r in range(cp) for c in token_indices(2 * cp, cp, r)))
        if env.mesh.layout.cp_method == "ulysses":
            return AttentionLayout(dealt, dealt, (QueryRun(0, 0, s),))
        n = s // 2
        own = token_indices(2 * cp, cp, env.index("cp"))
        return AttentionLayout(ChunkOrder(), dealt, tuple(QueryRun(i * n, c * n, n) for i, c in enumerate(own)))

"""The order of tokens under context parallelism: ranks hold chunks in zigzag order; kernels need sequence order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penteract.engine.kernels.kernel import Env
from penteract.ops.tape import Site
from penteract.parallel.context import token_indices


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """`chunks[i]`: the chunk of the sequence that is stored at place i. With one chunk, `restore` copies nothing."""

    chunks: tuple[int, ...] = (0,)

    @property
    def whole(self) -> bool:
        """Whether it lies in the order of the sequence already."""
        return len(self.chunks) == 1

    def restore(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """x in stored order -> in sequence order."""
        if self.whole:
            return x
        parts = x.chunk(len(self.chunks), dim)
        return torch.cat([parts[self.chunks.index(c)] for c in range(len(parts))], dim)

    def put(self, y: torch.Tensor, into: torch.Tensor, dim: int = 0, end: int | None = None) -> None:
        """Write y, in sequence order, into `into` in stored order; zeros for tokens from `end` on."""
        if self.whole and end is None:
            into.copy_(y)
            return
        size = into.shape[dim] // len(self.chunks)
        for place, c in enumerate(self.chunks):
            part = into.narrow(dim, place * size, size)
            if end is None or (c + 1) * size <= end:
                part.copy_(y.narrow(dim, c * size, size))
            else:
                part.zero_()

    def add(self, y: torch.Tensor, into: torch.Tensor, end: int) -> None:
        """Add y's tokens before `end` to `into`, along dim 0."""
        size = into.shape[0] // len(self.chunks)
        for place, c in enumerate(self.chunks):
            if (c + 1) * size <= end:
                into.narrow(0, place * size, size).add_(y.narrow(0, c * size, size))


def read_by(
    order: ChunkOrder, stored: Sequence[torch.Tensor], view: Callable[[torch.Tensor], torch.Tensor], dim: int = 0
) -> Callable[[], list[torch.Tensor]]:
    """What gives views of tensors in sequence order: always the same where they are stored so, else of new copies."""
    if not order.whole:
        return lambda: [view(order.restore(x, dim)) for x in stored]
    views = list(map(view, stored))
    return lambda: views


@dataclass(frozen=True, slots=True)
class QueryChunk:
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
        """The query rows of the chunk."""
        return slice(self.at, self.at + self.tokens)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The stored order of an attention's queries and keys, and the chunks of consecutive query tokens."""

    queries: ChunkOrder
    keys: ChunkOrder
    chunks: tuple[QueryChunk, ...]

    @staticmethod
    def of(env: Env, site: Site) -> AttentionLayout:
        """By `cp_method`: Ulysses (all tokens of some heads), or all-gathered keys (own queries, keys of all
        tokens)."""
        cp, s = env.mesh.layout.cp, int(site.ins[0].shape[0])  # type: ignore[arg-type]
        if cp == 1:
            return AttentionLayout(ChunkOrder(), ChunkOrder(), (QueryChunk(0, 0, s),))
        zigzag = ChunkOrder(tuple(c for r in range(cp) for c in token_indices(2 * cp, cp, r)))
        if env.mesh.layout.cp_method == "ulysses":
            return AttentionLayout(zigzag, zigzag, (QueryChunk(0, 0, s),))
        n = s // 2
        own = token_indices(2 * cp, cp, env.index("cp"))
        return AttentionLayout(ChunkOrder(), zigzag, tuple(QueryChunk(i * n, c * n, n) for i, c in enumerate(own)))

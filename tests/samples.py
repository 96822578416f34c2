"""Random packed sequences with document boundaries, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    targets: torch.Tensor
    start: torch.Tensor
    positions: torch.Tensor


def sample(index: int, length: int, vocabulary: int) -> Sample:
    """Sequence `index`: random tokens, one to three documents, targets ignored where a document ends."""
    g = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, vocabulary, (length + 1,), generator=g)
    targets, start = tokens[1:].clone(), torch.zeros(length, dtype=torch.int64)
    for at in torch.randint(1, length, (index % 3,), generator=g).sort().values.tolist():
        targets[at - 1] = -1
        start[at:] = at
    return Sample(tokens[:-1], targets, start, torch.arange(length) - start)


def stacked(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """[N, S] of each field."""
    return {k: torch.stack([getattr(s, k) for s in samples]) for k in ("tokens", "targets", "start", "positions")}

"""The micro-batches of a rank: which samples, and which of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from penteract.engine.data.pack import Array
from penteract.engine.data.token_sample import TokenSample
from penteract.parallel.context import token_indices
from penteract.step.program import Program

MicroBatch = Mapping[str, torch.Tensor]  # one micro-batch's data by name


def samples_of(program: Program, first: int) -> list[list[int]]:
    """The global sample numbers of this rank's micro-batches in the global batch that begins at sample `first`."""
    lay = program.layout
    me = program.mesh.coordinates(program.rank)["dp"]
    b = lay.micro_batch_size
    return [[first + (m * lay.dp + me) * b + i for i in range(b)] for m in range(lay.gradient_accumulation_steps)]


def micro_batch(program: Program, samples: Sequence[TokenSample], device: torch.device) -> dict[str, torch.Tensor]:
    """Sequences -> this rank's tensors by name.

    tokens, targets, start, positions  [S@cp, B]     `start:all` [S, B], in the order of gathered keys
    positions:tp                       [S@cp·tp, B]
    tokens:1 ahead, targets:1 ahead, … [S@cp, B]     for each depth of multi-token prediction
    """
    lay, wanted = program.layout, _inputs(program)
    at = program.mesh.coordinates(program.rank)
    own = torch.as_tensor(_own(program.sequence_length, lay.cp, at["cp"]))

    def stacked(name: str, index: torch.Tensor) -> torch.Tensor:
        """A field of the samples, of some tokens: they are taken before anything is copied."""
        return torch.stack([torch.as_tensor(getattr(x, name), dtype=torch.int64)[index] for x in samples], 1)

    out = {name: stacked(name, own) for name in ("tokens", "targets", "start", "positions")}
    for k in range(1, program.model.mtp_layers + 1):
        pairs = zip(*(_shifted(x, k) for x in samples), strict=True)
        out |= {
            f"{n}:{k} ahead": torch.stack([x[own] for x in xs], 1)
            for n, xs in zip(("tokens", "targets"), pairs, strict=True)
        }
    out["positions:tp"] = out["positions"].chunk(lay.tp)[at["tp"]]
    if "start:all" in wanted:
        out["start:all"] = stacked("start", torch.as_tensor(_gathered(program.sequence_length, lay.cp)))
    return {name: x.contiguous().to(device) for name, x in out.items() if name in wanted}


def _inputs(program: Program) -> set[str]:
    """Names of the data that this rank's chunks read."""
    return {name for chunk in program.chunks for name in chunk.tape.inputs}


def constants(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """Token indices of this rank, of the other ranks of its ring, and of all in all-gather order."""
    lay, s = program.layout, program.sequence_length
    me = program.mesh.coordinates(program.rank)["cp"]
    out = {"index": _own(s, lay.cp, me), "index:all": _gathered(s, lay.cp)}
    for i in range(1, lay.cp):
        out[f"index:{i} before"] = _own(s, lay.cp, (me - i) % lay.cp)
    return {name: torch.tensor(x, device=device) for name, x in out.items() if name in _inputs(program)}


# Of a long sequence, a list of its tokens takes as long to make as all else of a micro-batch. Kept as arrays: tensors
# would outlive a trainer that is deleted.
@lru_cache(maxsize=64)
def _own(sequence_length: int, ranks: int, rank: int) -> Array:
    """The tokens of a sequence that `rank` of cp holds, in its order."""
    return np.array(token_indices(sequence_length, ranks, rank), dtype=np.int64)


@lru_cache(maxsize=4)
def _gathered(sequence_length: int, ranks: int) -> Array:
    """All tokens in the order of an all-gather over cp."""
    return np.concatenate([_own(sequence_length, ranks, rank) for rank in range(ranks)])


def _shifted(sample: TokenSample, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens i + k and their targets. Targets in another document or beyond the sequence are ignored (-1); the last
    token stands in for tokens beyond the sequence."""
    tokens, targets, start = (
        torch.as_tensor(x, dtype=torch.int64) for x in (sample.tokens, sample.targets, sample.start)
    )
    at = torch.arange(k, len(tokens) + k)
    inside, at = at < len(tokens), at.clamp(max=len(tokens) - 1)
    return tokens[at], torch.where(inside.logical_and_(start[at] == start), targets[at], -1)


def target_count(samples: Sequence[TokenSample], k: int = 0) -> int:
    """Targets that are not ignored, shifted by `k` tokens."""
    return sum(int(((_shifted(x, k)[1] if k else torch.as_tensor(x.targets)) >= 0).sum()) for x in samples)


def target_counts(program: Program, micro_batches: Sequence[Sequence[TokenSample]]) -> list[int]:
    """Targets of these micro-batches that are not ignored, for each loss term that is a mean over them. The MTP term
    counts those of all depths."""
    depths = {"cross_entropy": range(1), "mtp": range(1, program.model.mtp_layers + 1)}
    return [sum(target_count(samples, k) for samples in micro_batches for k in depths[term]) for term in program.means]

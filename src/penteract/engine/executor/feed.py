"""The micro-batches of a rank: which samples, and which of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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
    lay, s = program.layout, program.sequence_length
    at = program.mesh.coordinates(program.rank)
    own = torch.tensor(token_indices(s, lay.cp, at["cp"]))
    whole = {
        name: torch.stack([torch.as_tensor(getattr(x, name), dtype=torch.int64) for x in samples], 1)
        for name in ("tokens", "targets", "start", "positions")
    }
    for k in range(1, program.model.mtp_layers + 1):
        pairs = zip(*(_shifted(x, k) for x in samples), strict=True)
        whole |= {f"{n}:{k} ahead": torch.stack(xs, 1) for n, xs in zip(("tokens", "targets"), pairs, strict=True)}
    out = {name: x[own] for name, x in whole.items()}
    out["positions:tp"] = out["positions"].chunk(lay.tp)[at["tp"]]
    out["start:all"] = whole["start"][torch.tensor(_gathered(program))]
    return {name: x.contiguous().to(device) for name, x in out.items() if name in _inputs(program)}


def _inputs(program: Program) -> set[str]:
    """Names of the data that this rank's chunks read."""
    return {name for chunk in program.chunks for name in chunk.tape.inputs}


def constants(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """Token indices of this rank, of the other ranks of its ring, and of all in all-gather order."""
    lay, s = program.layout, program.sequence_length
    me = program.mesh.coordinates(program.rank)["cp"]
    out = {"index": torch.tensor(token_indices(s, lay.cp, me)), "index:all": torch.tensor(_gathered(program))}
    for i in range(1, lay.cp):
        out[f"index:{i} before"] = torch.tensor(token_indices(s, lay.cp, (me - i) % lay.cp))
    return {name: x.to(device) for name, x in out.items() if name in _inputs(program)}


def _gathered(program: Program) -> list[int]:
    return [i for r in range(program.layout.cp) for i in token_indices(program.sequence_length, program.layout.cp, r)]


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
    return sum(int((_shifted(x, k)[1] >= 0).sum()) for x in samples)


def target_counts(program: Program, micro_batches: Sequence[Sequence[TokenSample]]) -> list[int]:
    """Targets of these micro-batches that are not ignored, for each loss term that is a mean over them. The MTP term
    counts those of all depths."""
    depths = {"cross_entropy": range(1), "mtp": range(1, program.model.mtp_layers + 1)}
    return [sum(target_count(samples, k) for samples in micro_batches for k in depths[term]) for term in program.means]

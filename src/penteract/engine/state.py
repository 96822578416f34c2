"""What a rank keeps between steps: parameters, gradients and optimizer state in flat buckets, and routers' biases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from penteract.ops.params import Param
from penteract.parallel.data import Bucket
from penteract.step.program import Program

COMPUTE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
STAT = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


@dataclass(slots=True)
class Flat:
    """One bucket's buffers. `master`: the parameter in full precision, or `parameter` itself where that is full."""

    bucket: Bucket
    parameter: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    mean: torch.Tensor  # AdamW's first moment
    square: torch.Tensor  # and second


@dataclass(slots=True)
class State:
    flats: list[Flat]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # views into the flats
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    biases: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tallies: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def views(self, kind: str) -> dict[str, torch.Tensor]:
        """`parameter`, `gradient`, `master`, `mean` or `square` of every parameter, by name."""
        out: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            out |= _cut(flat.bucket, getattr(flat, kind), self.parameters)
        return out


def _cut(bucket: Bucket, buffer: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        q.name: buffer[at : at + like[q.name].numel()].view(like[q.name].shape)
        for q, at in zip(bucket.params, bucket.offsets, strict=True)
    }


def allocate(p: Program, device: torch.device) -> State:
    """Buffers for rank p.rank, not yet filled."""
    compute, stat = COMPUTE[p.precision], STAT[p.precision]
    state = State([])
    for b in p.buckets:
        parameter = torch.zeros(b.size, dtype=compute, device=device)
        gradient, mean, square = (torch.zeros(b.size, dtype=stat, device=device) for _ in range(3))
        master = parameter if compute == stat else torch.zeros_like(gradient)
        state.flats.append(Flat(b, parameter, gradient, master, mean, square))
        for q, at in zip(b.params, b.offsets, strict=True):
            shape = q.local_shape(p.mesh)
            state.parameters[q.name] = parameter[at : at + q.numel(p.mesh)].view(shape)
            state.gradients[q.name] = gradient[at : at + q.numel(p.mesh)].view(shape)
    experts = p.model.moe.experts if p.model.moe else 0
    for name in p.balanced:
        state.biases[name] = torch.zeros(experts, dtype=stat, device=device)
        state.tallies[name] = torch.zeros(experts, dtype=torch.int64, device=device)
    return state


def initialise(p: Program, state: State, seed: int) -> None:
    """Fill parameters: each a function of (seed, name) alone, so every layout starts from the same model."""
    masters = state.views("master")
    for flat in state.flats:
        for q in flat.bucket.params:
            masters[q.name].copy_(_piece(p, q, seed))
        if flat.master is not flat.parameter:
            flat.parameter.copy_(flat.master)


def _piece(p: Program, q: Param, seed: int) -> torch.Tensor:
    """This rank's rectangle of the parameter's start, made from the whole."""
    if q.scale is None:
        return torch.full(q.local_shape(p.mesh), q.fill)
    digest = hashlib.sha256(f"{seed}/{q.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    whole = torch.randn(q.shape, generator=generator).mul_(q.scale)
    for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
        whole = whole.narrow(dim, at, n)
    return whole

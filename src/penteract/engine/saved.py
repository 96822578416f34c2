"""What of a rank's state goes into a checkpoint, by its global names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from penteract.engine.checkpoint import Slice
from penteract.engine.state import State
from penteract.step.program import Program

# Suffix of a parameter's other tensors -> the flat buffer they are views of.
KINDS = {"": "master", "/mean": "mean", "/square": "square"}


def state_slices(p: Program, state: State) -> Iterator[Slice]:
    """Parameters and both moments as rectangles of global tensors, and routers' biases."""
    for suffix, kind in KINDS.items():
        yield from _slices(p, state.views(kind), suffix)
    first = p.mesh.group("stage", p.rank)[0] == p.rank
    for name, bias in state.biases.items():
        yield Slice(f"{name}/bias", tuple(bias.shape), (0,), bias, first)


def gradient_slices(p: Program, state: State, into: Mapping[str, torch.Tensor] | None = None) -> Iterator[Slice]:
    """Gradients likewise; `into`: buffers of the same shapes to load into instead."""
    return _slices(p, into if into is not None else state.gradients, "")


def _slices(p: Program, tensors: Mapping[str, torch.Tensor], suffix: str) -> Iterator[Slice]:
    holders = {q.name: b.holders for b in p.buckets for q in b.params}
    number = {q.name: i for i, q in enumerate(p.everything)}
    for q in p.params:
        # All holders have the same bytes; they take turns at writing them.
        writer = holders[q.name][number[q.name] % len(holders[q.name])]
        yield Slice(q.name + suffix, q.shape, q.offset(p.mesh, p.rank), tensors[q.name], writer == p.rank)


def after_load(state: State) -> None:
    """Parameters follow their masters."""
    for flat in state.flats:
        if flat.master is not flat.parameter:
            flat.parameter.copy_(flat.master)

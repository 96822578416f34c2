"""What of a rank's state goes into a checkpoint, by its global names.

Masters and moments are saved as numbers of the dtype that updates are computed in, whatever they are kept in, so that
layouts and precisions read each other's. What is kept in fewer bits is rounded again when it is loaded: with the same
blocks to the same bits, and in other blocks or another dtype by one more rounding. It is widened on the CPU: the device
has no more of it than a slice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice, manifest, rectangles
from penteract.engine.checkpoint.manifest import ManifestEntry
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.device import device_of
from penteract.engine.executor.executor import Run
from penteract.engine.executor.state import Flat, Kept, ParameterPart, TrainingState
from penteract.step.program import Program
from penteract.step.update import parts

log = logging.getLogger(__name__)
RECIPE = ("loss_scale", "/largest")  # ends of the names of what one recipe of precision alone keeps
Logical = dict[Kept, list[torch.Tensor | None]]  # of each flat, where its optimizer keeps it

# Suffix of a parameter's other tensors -> the buffer that shards have of it.
KINDS: Mapping[str, Kept] = MappingProxyType(
    {"": "master", "/mean": "mean", "/square": "square", "/momentum": "momentum"}
)


def state_slices(p: Program, state: TrainingState) -> Iterator[Slice]:
    """Parameters and moments as rectangles of global tensors, and routers' biases: views where they are kept in
    the dtype that they are saved in, and copies on the CPU otherwise."""
    yield from _slices(p, state, _logical(p, state))


def load_state(at: Path, p: Program, state: TrainingState) -> dict[str, Any]:
    """Fill the state of this rank from a checkpoint; returns what was saved beside it."""
    logical, there = _logical(p, state), manifest.read(at).tensors
    wanted = [s for s in _slices(p, state, logical) if not s.name.endswith(RECIPE) or _fits(s, there)]
    extra = checkpoint.load(at, wanted)
    for kind, wide in logical.items():
        for flat, values in zip(state.flats, wide, strict=True):
            kept = flat.kept(kind)
            if kept is not None and values is not None and kept.dtype != values.dtype:
                for part in parts(len(kept)):
                    flat.write(kind, part, values[part].to(kept.device))
    return extra


def _fits(part: Slice, there: Mapping[str, ManifestEntry]) -> bool:
    """Whether a checkpoint has what one recipe of precision alone keeps; if not, it begins anew."""
    found = part.name in there and there[part.name].shape == tuple(part.shape)
    if not found:
        log.info("%s is not in the checkpoint, or of another shape: it begins anew", part.name)
    return found


def _logical(p: Program, state: TrainingState) -> Logical:
    dtype = dtype_of("stat", p.precision)

    if state.staging:
        device_of(state.routed.device).settle()  # what was moved last is on its way to the host

    def numbers(flat: Flat, kind: Kept) -> torch.Tensor | None:
        kept = flat.kept(kind)
        if kept is None or kept.dtype == dtype:
            return kept
        wide = torch.empty(len(kept), dtype=dtype)
        for part in parts(len(kept)):
            wide[part].copy_(flat.read(kind, part, dtype))
        return wide

    return {kind: [numbers(flat, kind) for flat in state.flats] for kind in KINDS.values()}


def _slices(p: Program, state: TrainingState, logical: Logical) -> Iterator[Slice]:
    for suffix, kind in KINDS.items():
        yield from slices(p, state.pieces_of(logical[kind]), suffix)
    first = p.mesh.group("stage", p.rank)[0] == p.rank
    if state.scaling is not None:
        values = state.scaling.values
        yield Slice("loss_scale", tuple(values.shape), (0,), values, p.rank == 0)
    if state.history is not None:
        for i, name in enumerate(state.history.names):
            largest = state.history.steps[:, i]
            yield Slice(f"{name}/largest", tuple(largest.shape), (0, 0), largest, first)
    for name, bias in state.biases.items():
        yield Slice(f"{name}/bias", tuple(bias.shape), (0,), bias, first)


def slices(p: Program, pieces: Iterable[ParameterPart], suffix: str = "") -> Iterator[Slice]:
    """Pieces of local rectangles as rectangles of global tensors; each element has one writer."""
    bucket_of = {q.name: b for b in p.buckets for q in b.params}
    number = {q.name: i for i, q in enumerate(p.everything)}
    for piece in pieces:
        q, bucket = piece.param, bucket_of[piece.param.name]
        # Replicas of a shard have the same bytes: they take turns at writing them.
        owner = bucket.replicate_ranks[number[q.name] % len(bucket.replicate_ranks)] == p.rank
        origin, at = q.offset(p.mesh, p.rank), 0
        for offset, size in rectangles(q.local_shape(p.mesh), piece.begin, piece.begin + len(piece.values)):
            there = tuple(o + i for o, i in zip(origin, offset, strict=True))
            part = piece.values[at : at + prod(size)].view(size)
            yield Slice(q.name + suffix, q.shape, there, part, owner)
            at += prod(size)


def after_load(run: Run) -> None:
    """Parameters follow their master weights, on all ranks that hold them. Called by every rank."""
    for b, flat in enumerate(run.state.flats):
        flat.follow()
        if flat.bucket.shards > 1 and flat.cut_parameter is None:
            run.gather(b)
    run.settle_parameters()

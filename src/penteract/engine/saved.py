"""What of a rank's state goes into a checkpoint, by its global names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from penteract.engine.checkpoint import Slice, rectangles
from penteract.engine.run import Run
from penteract.engine.state import Piece, State
from penteract.step.program import Program

# Suffix of a parameter's other tensors -> the buffer that shards have of it.
KINDS = {"": "master", "/mean": "mean", "/square": "square"}


def state_slices(p: Program, state: State) -> Iterator[Slice]:
    """Parameters and both moments as rectangles of global tensors, and routers' biases."""
    for suffix, kind in KINDS.items():
        yield from slices(p, state.pieces(kind), suffix)
    first = p.mesh.group("stage", p.rank)[0] == p.rank
    for name, bias in state.biases.items():
        yield Slice(f"{name}/bias", tuple(bias.shape), (0,), bias, first)


def slices(p: Program, pieces: Iterable[Piece], suffix: str = "") -> Iterator[Slice]:
    """Pieces of local rectangles as rectangles of global tensors; each element has one writer."""
    bucket_of = {q.name: b for b in p.buckets for q in b.params}
    number = {q.name: i for i, q in enumerate(p.everything)}
    for piece in pieces:
        q, bucket = piece.param, bucket_of[piece.param.name]
        # Replicas of a shard have the same bytes: they take turns at writing them.
        owner = bucket.replicas[number[q.name] % len(bucket.replicas)] == p.rank
        origin, at = q.offset(p.mesh, p.rank), 0
        for offset, size in rectangles(q.local_shape(p.mesh), piece.begin, piece.begin + len(piece.values)):
            there = tuple(o + i for o, i in zip(origin, offset, strict=True))
            part = piece.values[at : at + prod(size)].view(size)
            yield Slice(q.name + suffix, q.shape, there, part, owner)
            at += prod(size)


def after_load(run: Run) -> None:
    """Parameters follow their masters, on all holders. Called by every rank."""
    for b, flat in enumerate(run.state.flats):
        flat.follow()
        if flat.bucket.shards > 1 and flat.cut_parameter is None:
            run.gather(b)
    run.settle_parameters()

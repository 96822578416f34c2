"""The part of a rank's state that goes into a checkpoint, by global names.

Master weights and moments are saved in the dtype in which updates are computed, whatever dtype they are kept in. So a
checkpoint can be read by any layout and precision. State in fewer bits is rounded again when it is loaded: with the
same blocks this gives the same bits; other blocks or another dtype cost one more rounding. State is widened on the CPU;
the device holds no more than one widened slice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice, manifest, rectangles
from penteract.engine.checkpoint.boxes import Dims
from penteract.engine.checkpoint.manifest import ManifestEntry
from penteract.engine.device.device import device_of
from penteract.engine.dtypes import dtype_of
from penteract.engine.executor.executor import Executor
from penteract.engine.state.state import Flat, ParameterPart, StateKind, TrainingState
from penteract.ops.params import Param
from penteract.step.program import Program
from penteract.step.update import parts

log = logging.getLogger(__name__)
RECIPE_STATE = ("loss_scale", "/largest")  # name suffixes of state that only one precision recipe keeps
Widened = dict[StateKind, list[torch.Tensor | None]]  # one entry per flat: None where its optimizer has no such state

# Suffix of a saved tensor's name -> the state of the shard that it holds.
KINDS: Mapping[str, StateKind] = MappingProxyType(
    {"": "master", "/mean": "mean", "/square": "square", "/momentum": "momentum"}
)


class RecipeState:
    """The state that only one precision recipe keeps, as it was before a checkpoint was loaded: a checkpoint of another
    recipe lacks it."""

    def __init__(self, state: TrainingState) -> None:
        self._kept = [x.clone() for x in _recipe_tensors(state)]

    def restore(self, state: TrainingState) -> None:
        """Undo what a load changed of it."""
        for x, kept in zip(_recipe_tensors(state), self._kept, strict=True):
            x.copy_(kept)


def _recipe_tensors(state: TrainingState) -> list[torch.Tensor]:
    scaling = [] if state.scaling is None else [state.scaling.values]
    return scaling if state.history is None else [*scaling, state.history.steps]


def state_slices(p: Program, state: TrainingState) -> Iterator[Slice]:
    """Parameters, moments and routers' biases as rectangles of global tensors: views where the state is kept in the
    saved dtype, otherwise copies on the CPU."""
    yield from _slices(p, state, _widened(p, state))


def saved_bytes(p: Program) -> int:
    """Bytes of a checkpoint, of all ranks together: master weights and moments of all parameters."""
    moments = {q.name: len(b.optimizer_kind.moments) for b in p.buckets for q in b.params}
    most = max(moments.values())
    elements = sum(prod(q.shape) * (1 + moments.get(q.name, most)) for q in p.everything)
    return elements * dtype_of("stat", p.precision).itemsize


def load_state(at: Path, p: Program, state: TrainingState, threads: int = 1) -> dict[str, Any]:
    """Fill the state of this rank from a checkpoint, read by so many threads; returns the checkpoint's `extra`."""
    widened = _widened(p, state)
    slices = list(_slices(p, state, widened))
    stored = manifest.read(at, {s.name for s in slices})  # once: of a large run it is the longest of what all read
    wanted = [s for s in slices if not s.name.endswith(RECIPE_STATE) or _is_stored(s, stored.tensors)]
    extra = checkpoint.load(at, wanted, threads, stored)
    for kind, wide in widened.items():
        for flat, values in zip(state.flats, wide, strict=True):
            kept = flat.kept(kind)
            if kept is not None and values is not None and kept.dtype != values.dtype:
                for part in parts(len(kept)):
                    flat.write(kind, part, values[part].to(kept.device))
    return extra


def _is_stored(part: Slice, stored: Mapping[str, ManifestEntry]) -> bool:
    """Whether a checkpoint has this state, which only one precision recipe keeps. If not, it starts afresh."""
    found = part.name in stored and stored[part.name].shape == tuple(part.shape)
    if not found:
        log.info("%s is not in the checkpoint, or of another shape: it starts afresh", part.name)
    return found


def _widened(p: Program, state: TrainingState) -> Widened:
    dtype = dtype_of("stat", p.precision)

    device = device_of(state.routed.device)
    host = device.host
    if state.staging:
        device.settle()  # the last updated slices may still be on their way to the host

    def numbers(flat: Flat, kind: StateKind) -> torch.Tensor | None:
        kept = flat.kept(kind)
        if kept is None or kept.dtype == dtype:
            return kept
        wide = torch.empty(len(kept), dtype=dtype, device=host)
        for part in parts(len(kept)):
            wide[part].copy_(flat.read(kind, part, dtype))
        return wide

    return {kind: [numbers(flat, kind) for flat in state.flats] for kind in KINDS.values()}


def _slices(p: Program, state: TrainingState, widened: Widened) -> Iterator[Slice]:
    for suffix, kind in KINDS.items():
        yield from slices(p, state.parameter_parts_of(widened[kind]), suffix)
    yield from small_slices(p, state)


def small_slices(p: Program, state: TrainingState) -> Iterator[Slice]:
    """What is not in buckets: it may change at any point of a step."""
    first = p.mesh.group("dp_cp_tp", p.rank)[0] == p.rank
    if state.scaling is not None:
        values = state.scaling.values
        yield Slice("loss_scale", tuple(values.shape), (0,), values, p.rank == 0)
    if state.history is not None:
        for i, name in enumerate(state.history.names):
            largest = state.history.steps[:, i]
            yield Slice(f"{name}/largest", tuple(largest.shape), (0, 0), largest, first)
    for name, bias in state.biases.items():
        yield Slice(f"{name}/bias", tuple(bias.shape), (0,), bias, first)


class HeldBox(NamedTuple):
    """A rectangle of `param` that a rank holds: where it begins in the global tensor, its size, and where its elements
    begin among those that were asked for. `owner`: this rank writes it."""

    param: Param
    start: Dims
    size: Dims
    at: int
    owner: bool

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.size)


class HeldBoxes:
    """The rectangles that a rank holds of parameters, and which of them it writes: one rank writes each element."""

    def __init__(self, p: Program) -> None:
        self._p, self._bucket_of = p, {q.name: b for b in p.buckets for q in b.params}
        self._number = {q.name: i for i, q in enumerate(p.everything)}

    def of(self, q: Param, begin: int, count: int) -> Iterator[HeldBox]:
        """The rectangles of `count` elements of the local rectangle of q, from `begin` on."""
        p, bucket = self._p, self._bucket_of[q.name]
        # Replicas of a shard have the same bytes, so parameters are dealt out to them in turn.
        owner = bucket.replicate_ranks[self._number[q.name] % len(bucket.replicate_ranks)] == p.rank
        origin, at = q.offset(p.mesh, p.rank), 0
        for offset, size in rectangles(q.local_shape(p.mesh), begin, begin + count):
            box = HeldBox(q, tuple(o + i for o, i in zip(origin, offset, strict=True)), size, at, owner)
            yield box
            at += box.count


def slices(p: Program, held: Iterable[ParameterPart], suffix: str = "") -> Iterator[Slice]:
    """Parts of local rectangles as rectangles of global tensors."""
    boxes = HeldBoxes(p)
    for part in held:
        for box in boxes.of(part.param, part.begin, len(part.values)):
            values = part.values[box.at : box.at + box.count].view(box.size)
            yield Slice(part.param.name + suffix, part.param.shape, box.start, values, box.owner)


def after_load(run: Executor) -> None:
    """Copy the loaded master weights to the parameters, and all-gather these. Called by every rank."""
    if run.state.largest_weights is not None:
        run.state.largest_weights.forget()
    for b, flat in enumerate(run.state.flats):
        flat.copy_from_master()
        if flat.bucket.shards > 1 and flat.cut_parameter is None:
            run.gather(b)
    run.settle_parameters()

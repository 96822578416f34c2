"""What a rank keeps between steps: parameters, gradients and optimizer state in flat buckets, and routers' biases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from penteract.engine import moments
from penteract.engine.chance import Place
from penteract.engine.dtypes import dtype_of
from penteract.engine.history import History
from penteract.engine.scaling import LossScale
from penteract.ops.params import Param
from penteract.parallel.data import Bucket
from penteract.spec.precision import BLOCK
from penteract.step.program import Program
from penteract.step.update import is_sliced

Kept = Literal["master", "mean", "square"]  # what the optimizer keeps


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter's local rectangle, read row by row: those from `begin` on, [n]."""

    param: Param
    begin: int
    values: torch.Tensor


@dataclass(slots=True)
class Flat:
    """One bucket's buffers: parameters and gradients of all of it, and of this rank's shard what the optimizer keeps.

    `master`: the shard as the optimizer moves it; a view of `parameter` where that has no master.
    """

    bucket: Bucket
    shard: range  # of the bucket's elements
    parameter: torch.Tensor  # [size]
    gradient: torch.Tensor  # [size]; once it is reduced, valid in the shard alone
    master: torch.Tensor  # [shard_size]
    mean: torch.Tensor  # AdamW's first moment
    square: torch.Tensor  # and second
    scales: dict[str, torch.Tensor]  # of both, [shard_size / 256], where they are codes
    sliced: bool  # what is narrower than the update is widened by slices
    places: tuple[Place, ...] = ()  # of parameters that are rounded by chance

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that is kept between steps; one may be a view of another."""
        return (self.parameter, self.gradient, self.master, self.mean, self.square, *self.scales.values())

    @property
    def own_parameter(self) -> torch.Tensor:
        """The shard of `parameter`, a view."""
        return self.parameter[self.shard.start : self.shard.stop]

    @property
    def own_gradient(self) -> torch.Tensor:
        """The shard of `gradient`, a view."""
        return self.gradient[self.shard.start : self.shard.stop]

    def read(self, kind: Kept, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Elements of what the optimizer keeps as `dtype`: views where they are that already."""
        kept, scales = getattr(self, kind)[part], self._scales(kind, part)
        return moments.read(kept, scales, dtype, signed=kind == "mean")

    def write(self, kind: Kept, part: slice, values: torch.Tensor) -> None:
        """Put them back, rounded; `values` may be lost."""
        kept, scales = getattr(self, kind)[part], self._scales(kind, part)
        moments.write(kept, scales, values, signed=kind == "mean")

    def _scales(self, kind: str, part: slice) -> torch.Tensor | None:
        scales = self.scales.get(kind)
        return None if scales is None else scales[part.start // BLOCK : part.stop // BLOCK]

    def follow(self) -> None:
        """The shard's parameters are its masters, rounded."""
        if self.master.dtype != self.parameter.dtype:
            self.own_parameter.copy_(self.master)


@dataclass(slots=True)
class State:
    flats: list[Flat]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # views into the flats
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    biases: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tallies: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    scaling: LossScale | None = None
    history: History | None = None

    def pieces(self, kind: Literal["gradient", "master", "mean", "square"]) -> Iterator[Piece]:
        """What this rank's shards hold of every parameter, as views; of some they hold nothing."""
        return self.pieces_of([f.own_gradient if kind == "gradient" else getattr(f, kind) for f in self.flats])

    def pieces_of(self, shards: Iterable[torch.Tensor]) -> Iterator[Piece]:
        """The same of `shards`, one tensor a flat."""
        for flat, own in zip(self.flats, shards, strict=True):
            for q, at in zip(flat.bucket.params, flat.bucket.offsets, strict=True):
                begin = max(at, flat.shard.start)
                end = min(at + self.parameters[q.name].numel(), flat.shard.stop)
                if begin < end:
                    yield Piece(q, begin - at, own[begin - flat.shard.start : end - flat.shard.start])


def allocate(p: Program, device: torch.device) -> State:
    """Buffers for rank p.rank, not yet filled."""
    dtype = {role: dtype_of(role, p.precision) for role in ("parameter", "gradient", "master", "moment", "stat")}
    state = State([])
    for b in p.buckets:
        shard = b.shard(p.rank)
        parameter = torch.zeros(b.size, dtype=dtype["parameter"], device=device)
        gradient = torch.zeros(b.size, dtype=dtype["gradient"], device=device)
        mean, square = (torch.zeros(b.shard_size, dtype=dtype["moment"], device=device) for _ in range(2))
        master = parameter[shard.start : shard.stop]
        if p.precision.master:
            master = torch.zeros(b.shard_size, dtype=dtype["master"], device=device)
        blocks = b.shard_size // BLOCK if p.precision.moments == "int8" else 0
        scales = {kind: torch.zeros(blocks, device=device) for kind in ("mean", "square") if blocks}
        places = tuple(_places(p, b)) if p.precision.stochastic else ()
        state.flats.append(
            Flat(b, shard, parameter, gradient, master, mean, square, scales, is_sliced(p.precision), places)
        )
        for q, at in zip(b.params, b.offsets, strict=True):
            shape = q.local_shape(p.mesh)
            state.parameters[q.name] = parameter[at : at + q.numel(p.mesh)].view(shape)
            state.gradients[q.name] = gradient[at : at + q.numel(p.mesh)].view(shape)
    if p.precision.loss_scale:
        state.scaling = LossScale(p.precision.loss_scale, p.precision.growth_every, device)
    if sites := p.delayed:
        state.history = History([s.params[0] for s in sites], sites[0].attrs["fp8"].history, device)
    experts = p.model.moe.experts if p.model.moe else 0
    for name in p.balanced:
        state.biases[name] = torch.zeros(experts, dtype=dtype["stat"], device=device)
        state.tallies[name] = torch.zeros(experts, dtype=torch.int64, device=device)
    return state


def _places(p: Program, b: Bucket) -> Iterator[Place]:
    """Where the parameters of this rank's shard lie in their global tensors."""
    shard = b.shard(p.rank)
    for q, at in zip(b.params, b.offsets, strict=True):
        begin, end = max(at, shard.start), min(at + q.numel(p.mesh), shard.stop)
        if begin < end:
            yield Place.of(q, p.mesh, p.rank, at=begin - shard.start, begin=begin - at, count=end - begin)


def initialise(p: Program, state: State, seed: int) -> None:
    """Fill parameters: each a function of (seed, name) alone, so every layout starts from the same model."""
    fill(state, ((q, _piece(p, q, seed)) for q in p.params))


def fill(state: State, whole: Iterable[tuple[Param, torch.Tensor]]) -> None:
    """Set parameters, and masters in full precision, from each one's whole local rectangle, one at a time."""
    masters = {piece.param.name: piece for piece in state.pieces("master")}
    for q, value in whole:
        state.parameters[q.name].copy_(value)
        if (mine := masters.get(q.name)) is not None:
            mine.values.copy_(value.reshape(-1)[mine.begin : mine.begin + len(mine.values)])


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

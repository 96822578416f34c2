"""The state of a rank between steps: parameters, gradients and optimizer state in flat buckets, and routers' biases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from penteract.config.optimizers import ADAMW, Moment, OptimizerKind
from penteract.config.precision.policy import MOMENT_BLOCK, Policy
from penteract.engine.device.device import device_of
from penteract.engine.device.storages import same_memory
from penteract.engine.device.zeros import Zeros
from penteract.engine.dtypes import FORMATS, dtype_of
from penteract.engine.kernels.quantised.largest_rows import LargestRows
from penteract.engine.kernels.quantised.quantise import quantiser
from penteract.engine.state import moments, split_master
from penteract.engine.state.counter_random import ParameterSlice
from penteract.engine.state.delayed_scales import AmaxHistory
from penteract.engine.state.largest_weights import LargestWeights
from penteract.engine.state.loss_scaling import LossScale
from penteract.engine.state.quantised_weights import QuantisedWeights, ShardValues
from penteract.ops.declarations.quantised.fp8 import casts
from penteract.ops.params import Param
from penteract.parallel.data import Bucket
from penteract.step.clear_rows import ClearRows, clear_rows
from penteract.step.program import Program
from penteract.step.ring_buffer import RingBuffer, gradient_ring_buffer, parameter_ring_buffer
from penteract.step.update import is_sliced, staging_buffers

StateKind = Literal["master"] | Moment  # the kinds of optimizer state
Buffers = dict[str, torch.Tensor]  # optimizer state by kind, and scales as "mean/scales"


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """Elements of one parameter's local rectangle in row-major order: those from `begin` on, [n]."""

    param: Param
    begin: int
    values: torch.Tensor


@dataclass(slots=True)
class Flat:
    """The buffers of one bucket: parameters and gradients of the whole bucket, and the optimizer state of this rank's
    shard.

    If parameters or gradients are sharded (cut), the whole bucket's buffer is part of a ring buffer that buckets share,
    and the shard has a buffer of its own. `master`: the weights that the optimizer updates; if they are split, the 16
    bits of them that the shard of the parameters lacks; without master weights, the shard of the parameters itself.
    """

    bucket: Bucket
    shard: range  # of the bucket's elements
    parameter: torch.Tensor  # [size]; bytes if it is gathered in FP8
    gradient: torch.Tensor  # [size]; after the reduce-scatter only the shard is valid
    cut_parameter: torch.Tensor | None  # [shard_size]; None: not sharded
    cut_gradient: torch.Tensor | None
    master: torch.Tensor  # [shard_size]
    moments: dict[Moment, torch.Tensor]  # those that its optimizer keeps
    scales: dict[Moment, torch.Tensor]  # of quantised moments, [shard_size / 256]
    sliced: bool  # state narrower than the update is widened slice by slice
    parameter_slices: tuple[ParameterSlice, ...] = ()  # with stochastic rounding: the parameters of the shard
    clear_rows: ClearRows | None = None  # a table in it, of whose gradient most rows are zero
    largest: LargestRows | None = None  # where the update's kernel puts the largest values of its weights

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All buffers that are on the device between steps; some are views of others."""
        state = () if self.bucket.offloaded else self.optimizer_state.values()
        return (self.own_parameter, self.own_gradient, *state, self.parameter, self.gradient)

    @property
    def optimizer_state(self) -> Buffers:
        """The optimizer state of the shard: master weights, moments and their scales. On the host if the bucket is
        offloaded."""
        scales = {f"{kind}/scales": x for kind, x in self.scales.items()}
        master = {} if same_memory(self.master, self.own_parameter) else {"master": self.master}
        return {**master, **self.moments, **scales}

    def part(self, at: slice, buffers: Buffers) -> Flat:
        """Elements `at` of the shard as a separate Flat; `buffers`: their optimizer state."""
        own, shard = self.own_parameter[at], self.shard[at]
        return replace(
            self, shard=shard, cut_parameter=own, cut_gradient=self.own_gradient[at],
            master=buffers.get("master", own), moments={kind: buffers[kind] for kind in self.moments},
            scales={kind: buffers[f"{kind}/scales"] for kind in self.scales},
            parameter_slices=tuple(replace(q, at=q.at - at.start) for q in self.parameter_slices), clear_rows=None,
            largest=None if self.largest is None else self.largest.part(at.start),
        )  # fmt: skip

    @property
    def own_parameter(self) -> torch.Tensor:
        """The shard of the parameters."""
        return self._shard_of(self.parameter) if self.cut_parameter is None else self.cut_parameter

    @property
    def own_gradient(self) -> torch.Tensor:
        """The shard of the gradients."""
        return self._shard_of(self.gradient) if self.cut_gradient is None else self.cut_gradient

    def reduced_shard(self, wire: torch.dtype) -> torch.Tensor:
        """The part of `gradient` where a reduce-scatter in dtype `wire`, which is not wider, leaves the shard's sum."""
        return self._shard_of(self.gradient.view(wire))

    def _shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.shard.start : self.shard.stop]

    @property
    def splits_master(self) -> bool:
        """Whether the upper half of the master weights is the shard of the parameters."""
        return self.master.dtype == torch.int16

    def kept(self, kind: StateKind) -> torch.Tensor | None:
        """The whole optimizer state of one kind; None if the optimizer has no such state."""
        return self.master if kind == "master" else self.moments.get(kind)

    def read(self, kind: StateKind, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Elements of the optimizer state as `dtype`: views if they already have this dtype."""
        if kind == "master" and self.splits_master:
            return split_master.join(self.own_parameter[part], self.master[part]).to(dtype)
        kept, scales = self._part(kind, part)
        return moments.dequantize(kept, scales, dtype, signed=kind != "square")

    def write(self, kind: StateKind, part: slice, values: torch.Tensor) -> None:
        """Write elements of the optimizer state, rounded to its dtype; `values` may be overwritten. With split master
        weights, this writes the parameters too."""
        if kind == "master" and self.splits_master:
            return split_master.split(values.float(), self.own_parameter[part], self.master[part])
        kept, scales = self._part(kind, part)
        moments.quantize(kept, scales, values, signed=kind != "square")

    def _part(self, kind: StateKind, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Elements in the dtype of the state, and the scales of their blocks."""
        if kind == "master":
            return self.master[part], None
        scales = self.scales.get(kind)
        blocks = slice(part.start // MOMENT_BLOCK, part.stop // MOMENT_BLOCK)
        return self.moments[kind][part], None if scales is None else scales[blocks]

    def copy_from_master(self) -> None:
        """Set the shard's parameters to its master weights, rounded."""
        if not self.splits_master and self.master.dtype != self.own_parameter.dtype:
            self.own_parameter.copy_(self.master)


@dataclass(slots=True)
class TrainingState:
    """`parameters` and `gradients` are views into the flats. If a bucket is sharded, they are valid only while it is
    gathered, or its gradient buffer is acquired."""

    flats: list[Flat]
    ring_buffers: list[torch.Tensor] = field(
        default_factory=list[torch.Tensor]
    )  # for gathered parameters and unreduced gradients of sharded buckets
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    biases: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tokens_per_expert: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # rows of `routed`
    clear_rows: dict[str, ClearRows] = field(default_factory=dict[str, ClearRows])  # by table
    routed: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    scaling: LossScale | None = None
    history: AmaxHistory | None = None
    quantised_weights: QuantisedWeights | None = None
    largest_weights: LargestWeights | None = None
    zeros: Zeros = field(default_factory=partial(Zeros, 0, torch.device("cpu")))  # of casts
    staging: list[Buffers] = field(default_factory=list[Buffers])  # device buffers for slices of offloaded state

    def resident(self) -> list[torch.Tensor]:
        """All flat buffers on the device; some are views of others."""
        return [
            *(t for f in self.flats for t in f.buffers),
            *self.ring_buffers,
            *(t for s in self.staging for t in s.values()),
        ]

    def on_host(self) -> list[torch.Tensor]:
        """The optimizer state on the host."""
        return [t for f in self.flats if f.bucket.offloaded for t in f.optimizer_state.values()]

    def parameter_parts(self, kind: Literal["parameter", "gradient"] | StateKind) -> Iterator[ParameterPart]:
        """The parts of parameters, gradients or optimizer state in this rank's shards, as views."""
        match kind:
            case "parameter":
                return self.parameter_parts_of([f.own_parameter for f in self.flats])
            case "gradient":
                return self.parameter_parts_of([f.own_gradient for f in self.flats])
            case _:
                return self.parameter_parts_of([f.kept(kind) for f in self.flats])

    def parameter_parts_of(self, shards: Iterable[torch.Tensor | None]) -> Iterator[ParameterPart]:
        """The same for `shards`: one tensor for each flat, or None."""
        given = list(shards)
        for number, q, begin, within in self.shard_parts():
            if (own := given[number]) is not None:
                yield ParameterPart(q, begin, own[within.start : within.stop])

    def shard_parts(self) -> Iterator[tuple[int, Param, int, range]]:
        """The parts of parameters in this rank's shards: the number of the flat, the parameter, the first element of
        its local rectangle, and where they are in the shard."""
        for number, flat in enumerate(self.flats):
            for q, at in zip(flat.bucket.params, flat.bucket.offsets, strict=True):
                begin = max(at, flat.shard.start)
                end = min(at + self.parameters[q.name].numel(), flat.shard.stop)
                if begin < end:
                    yield number, q, begin - at, range(begin - flat.shard.start, end - flat.shard.start)


def allocate(p: Program, device: torch.device) -> TrainingState:
    """The buffers of rank p.rank, all zero: rows of a table that stay clear rely on it. Parameters are set later."""
    dtype = {role: dtype_of(role, p.precision) for role in ("parameter", "gradient", "stat", "fp8")}
    clear = clear_rows(p)
    state = TrainingState([], clear_rows=clear)
    whole = _RingBuffer(parameter_ring_buffer(p.buckets, p.layout, p.widths), dtype["parameter"], device)
    sums = _RingBuffer(gradient_ring_buffer(p.buckets, p.widths), dtype["gradient"], device)
    state.ring_buffers += [*whole.entries, *sums.entries]
    for i, b in enumerate(p.buckets):
        shard = b.shard(p.rank)
        parameter, cut_parameter = whole.buffers(i, b, dtype[b.gathered_as], cut=b.cut_parameters)
        gradient, cut_gradient = sums.buffers(i, b, dtype["gradient"], cut=b.cut_gradients)
        policy = p.precision.keeping(b.moments)
        made = _optimizer(b.shard_size, policy, device, b.optimizer_kind, host=b.offloaded)
        names = b.optimizer_kind.moments
        moments: dict[Moment, torch.Tensor] = {kind: made[kind] for kind in names}
        scaled: list[Moment] = [kind for kind in names if f"{kind}/scales" in made]
        scales: dict[Moment, torch.Tensor] = {kind: made[f"{kind}/scales"] for kind in scaled}
        slices = tuple(_parameter_slices(p, b)) if p.precision.stochastic else ()
        flat = Flat(
            b, shard, parameter, gradient, cut_parameter, cut_gradient, parameter, moments, scales,
            is_sliced(policy), slices, next((clear[q.name] for q in b.params if q.name in clear), None),
        )  # fmt: skip
        flat.master = made.get("master", flat.own_parameter)
        state.flats.append(flat)
        for q, at in zip(b.params, b.offsets, strict=True):
            shape = q.local_shape(p.mesh)
            state.parameters[q.name] = _read(p, b, parameter[at : at + q.numel(p.mesh)]).view(shape)
            state.gradients[q.name] = gradient[at : at + q.numel(p.mesh)].view(shape)
    staging = staging_buffers(((b, 1) for b in p.buckets), p.precision)
    for _ in range(staging.count):
        state.staging.append(_optimizer(staging.elements, staging.p, device, scaled=staging.scaled))
    if p.precision.loss_scale:
        state.scaling = LossScale(p.precision.loss_scale, p.precision.growth_every, device)
    if sites := p.delayed_scaling:
        state.history = AmaxHistory([s.params[0] for s in sites], sites[0].attrs["fp8"].history, device)
    if sites := p.quantised_weights:
        names = [s.params[0] for s in sites]
        parts = {
            x.param.name: ShardValues(x.begin, x.values)
            for x in state.parameter_parts("parameter")
            if x.param.name in names
        }
        state.quantised_weights = QuantisedWeights(
            sites[0].attrs["fp8"], names, parts, device, quantiser(p.layout.elementwise)
        )
    if sites := p.known_weights:
        state.largest_weights = LargestWeights.of(sites, state.parameters, p.buckets, device)
        for i, flat in enumerate(state.flats):
            flat.largest = state.largest_weights.rows.get(i)
    state.zeros = Zeros(sum(map(casts, p.fp8_sites)), device)
    experts = p.model.moe.experts if p.model.moe else 0
    state.routed = torch.zeros(len(p.balanced), experts, dtype=torch.int64, device=device)
    state.tokens_per_expert = dict(zip(p.balanced, state.routed.unbind(), strict=True))
    state.biases = {name: torch.zeros(experts, dtype=dtype["stat"], device=device) for name in p.balanced}
    return state


def _read(p: Program, b: Bucket, whole: torch.Tensor) -> torch.Tensor:
    """A parameter in the dtype that matrix products read: FP8 if it is gathered in FP8."""
    fp8 = p.precision.fp8
    return whole.view(FORMATS[fp8.operand]) if fp8 and b.gathered_as == "fp8" else whole


def _optimizer(
    n: int,
    p: Policy,
    device: torch.device,
    optimizer_kind: OptimizerKind = ADAMW,
    *,
    host: bool = False,
    scaled: bool = False,
) -> Buffers:
    """Optimizer state for n elements: on the device, or on the host in page-locked memory, so that copies overlap
    compute. `scaled`: add scales even if moments of this dtype need none."""
    where, pinned = (device_of(device).host, device_of(device).pinned) if host else (device, False)

    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=where, pin_memory=pinned)

    moment, scaled = dtype_of("moment", p), scaled or p.moments == "int8"
    master_dtype = torch.int16 if p.splits_master else dtype_of("master", p)
    master = {"master": zeros(n, master_dtype)} if p.master else {}
    scales = {f"{kind}/scales": zeros(n // MOMENT_BLOCK, torch.float32) for kind in optimizer_kind.moments if scaled}
    return {**master, **{kind: zeros(n, moment) for kind in optimizer_kind.moments}, **scales}


def _parameter_slices(p: Program, b: Bucket) -> Iterator[ParameterSlice]:
    """The places of this rank's shard in the global tensors of its parameters."""
    shard = b.shard(p.rank)
    for q, at in zip(b.params, b.offsets, strict=True):
        begin, end = max(at, shard.start), min(at + q.numel(p.mesh), shard.stop)
        if begin < end:
            yield ParameterSlice.of(q, p.mesh, p.rank, at=begin - shard.start, begin=begin - at, count=end - begin)


@dataclass(slots=True)
class _RingBuffer:
    """A ring buffer's entries. It gives each bucket its buffers: an entry if the bucket is sharded, else one of its
    own. `dtype`: of shards."""

    ring_buffer: RingBuffer
    dtype: torch.dtype
    device: torch.device
    entries: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = [self._zeros(n // self.dtype.itemsize) for n in self.ring_buffer.sizes if n]

    def buffers(
        self, bucket: int, b: Bucket, whole: torch.dtype, *, cut: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The buffer of a whole bucket, and that of its shard; None if the shard is a view of the whole."""
        if not cut:
            return self._zeros(b.size), None
        entry, at = self.ring_buffer.of(bucket)
        index = sum(n > 0 for n in self.ring_buffer.sizes[:entry])
        buffer = self.entries[index].view(torch.uint8)[at : at + b.size * whole.itemsize]
        return buffer.view(whole), self._zeros(b.shard_size)

    def _zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=self.dtype, device=self.device)

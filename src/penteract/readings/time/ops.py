"""The clock's ops of a rank: those of a layer's calls, of bucket events, and of reductions outside of the tape."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.config.mesh import Mesh
from penteract.ops.offload import OFFLOAD_OPS, Copy
from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.readings.costs.rates import GroupSpan
from penteract.readings.layers.layer_program import LayerProgram
from penteract.readings.time.clock import CHAINED, FIRST, IN, OUT, PART, RUN, START, SYNC, WAIT, Key, Op, ps
from penteract.readings.time.cost import DIMENSION, BucketCosts, DeviceCosts
from penteract.step import names
from penteract.step.all_reduces import StepAllReduce
from penteract.step.update import StagingBuffers, optimizer_buffers, staging_buffers

Positions = tuple[tuple[Op, ...], ...]  # ops of each instruction of an action
DATA, UPDATE, HOST = PART["data"], PART["update"], PART["host"]
AXES = tuple(DIMENSION)  # axes of the tape's collectives
Axes = tuple[int, ...]  # the stream of each axis; 0 where its group has one rank


@dataclass(slots=True)
class Streams:
    """The streams of one rank: one for each set of ranks with which it communicates; axes with the same ranks share
    one. Those of the tape's axes come first, so that layers of many layouts use the same numbers."""

    mesh: Mesh
    rank: int
    by_ranks: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    parts: list[int] = field(default_factory=lambda: [DATA, HOST, HOST])
    axes: Axes = field(init=False)

    def __post_init__(self) -> None:
        """Open the streams of the tape's axes, before those of any bucket."""
        groups = [(self.mesh.group(axis, self.rank), PART[DIMENSION[axis]]) for axis in AXES]
        self.axes = tuple([self.of(ranks, part) if len(ranks) > 1 else 0 for ranks, part in groups])

    def of(self, ranks: tuple[int, ...], part: int) -> int:
        """The stream of a group. `part`: the part of a step to which waits for it belong; if groups coincide, that of
        the first."""
        if ranks not in self.by_ranks:
            self.by_ranks[ranks] = FIRST + len(self.by_ranks)
            self.parts.append(part)
        return self.by_ranks[ranks]


class ActionOps(NamedTuple):
    """The ops of an action of a layer.

    every  ops of each of its instructions
    own    the same without `moved`
    moved  copies that run during a neighbour: a copy from the host starts during the layer before, and a copy to the
           host is waited for at the end of the next layer that has copies
    last   copies of neighbours are inserted after this many of its instructions
    """

    every: Positions
    own: Positions
    moved: tuple[Op, ...]
    last: int


def layer_ops(layer: LayerProgram, device: DeviceCosts, axes: Axes) -> Mapping[str, ActionOps]:
    """The clock's ops of each action of a layer."""
    out, ops_of_job = dict[str, ActionOps](), dict[int, tuple[Op, ...]]()  # a recomputed call takes as long
    # Further chunks of a loss add to what the first has written.
    written, adding = set[str](), replace(device, adds=True)
    for name, calls in layer.outline.calls.items():
        jobs = [layer.outline.jobs[job] for job, _, _ in calls]
        every: list[tuple[Op, ...]] = []
        for (place, phase), (job, ins, outs) in zip(jobs, calls, strict=True):
            if (ops := ops_of_job.get(job)) is None:
                params = layer.sites[place].params if phase == "weight_gradient" else ()
                costs = device if written.isdisjoint(params) else adding
                ops = _call(layer, costs, axes, place, phase, ins, outs)
                written.update(params)
                if phase not in ("start", "finish"):
                    ops_of_job[job] = ops
            every.append(ops)
        out[name] = _without_copies(every, [_is_copy(layer, *job) for job in jobs], name)
    return out


def _is_copy(layer: LayerProgram, place: int, phase: Phase) -> bool:
    return layer.sites[place].op_name in OFFLOAD_OPS


def _without_copies(every: Sequence[tuple[Op, ...]], copies: Sequence[bool], action: str) -> ActionOps:
    """Separate the copies that run during neighbours (`ops/offload.py`). The copy of a layer's input to the host runs
    during the layer itself."""
    own = [i for i, copy in enumerate(copies) if not copy]
    if len(own) == len(every):
        return ActionOps(tuple(every), tuple(every), (), len(every))
    first, last = own[0], own[-1]
    if action == "Fwd":
        inputs = {every[i][0][3] for i in range(first)}  # keys of copies that begin before the first call
        moved = [
            i for i in range(last, len(every)) if copies[i] and every[i][0][0] == WAIT and every[i][0][1] not in inputs
        ]
        behind = last + 1
        while behind < len(every) and every[behind][0][0] == WAIT and behind not in moved:
            behind += 1
    else:
        moved, behind = [i for i, copy in enumerate(copies) if copy and every[i][0][0] == START], len(every)
    kept = tuple([() if i in moved else ops for i, ops in enumerate(every)])
    return ActionOps(tuple(every), kept, tuple([op for i in moved for op in every[i]]), behind)


def _call(
    layer: LayerProgram, device: DeviceCosts, axes: Axes, place: int, phase: Phase, ins: Sequence[int],
    outs: Sequence[int]
) -> tuple[Op, ...]:  # fmt: skip
    site = layer.sites[place]
    name = names.of_call(phase, site)
    if phase == "finish":
        return ((WAIT, ("c", 0, ins[-1]), _part(site), name),)
    if phase == "start":
        copies = {OFFLOAD_OPS[0]: OUT, OFFLOAD_OPS[1]: IN}
        stream = copies[site.op_name] if site.op_name in OFFLOAD_OPS else axes[AXES.index(str(site.attrs["axis"]))]
        return ((START, stream, ps(device.collective(site)), ("c", 0, outs[0]), name),)
    part, seconds, scale_reduce = device.call(site, phase, layer.specs, (*ins, *outs))
    run: Op = (RUN, ps(seconds), PART[part], name)
    if site.op_name == "split_sizes":
        return (run, (SYNC, name))
    if scale_reduce is not None:
        axis, took = scale_reduce
        part = "tensor" if axis == "sequence" else DIMENSION[axis]
        key: Key = ("a", 0, 0)
        scale = names.of_scale(name)
        return (run, (START, axes[AXES.index(axis)], ps(took), key, scale), (WAIT, key, PART[part], scale))
    return (run,)


def _part(site: Site) -> int:
    return HOST if site.op_name in OFFLOAD_OPS else PART[DIMENSION[str(site.attrs["axis"])]]


@dataclass(slots=True)
class BucketOps:
    """The ops of bucket events of one rank. A key identifies a collective in flight."""

    buckets: Sequence[Bucket]
    costs: BucketCosts
    streams: Streams
    durations: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    streamed: StreamedUpdate | None = None

    def _took(self, what: str, b: Bucket) -> int:
        key = what, id(b)
        if key not in self.durations:
            seconds = getattr(self.costs, what)(b) if what not in _WIRES else self.costs.on_wire(what, b)
            self.durations[key] = ps(seconds)
        return self.durations[key]

    def _stream(self, ranks: tuple[int, ...]) -> int:
        return self.streams.of(ranks, DATA)

    def gather(self, b: Bucket, key: Key) -> Iterator[Op]:
        """All-gather a bucket's parameters over its shard group; quantised to FP8 first where the bucket says so."""
        if b.gathered_as == "fp8":
            yield RUN, self._took("quantise", b), DATA, names.QUANTISE
        yield START, self._stream(b.shard_ranks), self._took("all_gather", b), key, names.GATHER

    def reduce(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Reduce-scatter a bucket's gradients, or all-reduce them where they are not sharded."""
        if len(b.reduce_ranks) == 1:
            return
        if took := self._took("narrowed", b):
            yield RUN, took, DATA, names.NARROW
        kind, ranks = ("reduce_scatter", b.shard_ranks) if b.shards > 1 else ("all_reduce", b.replicate_ranks)
        yield START, self._stream(ranks), self._took(kind, b), key, names.of_sum(b)

    def replicate(self, b: Bucket, waited: Key, key: Key) -> Iterator[Op]:
        """All-reduce a shard's gradients over its replicate group."""
        before = self._took("narrowed_shard", b) if b.cut_gradients else 0
        yield (
            CHAINED,
            waited,
            before,
            self._stream(b.replicate_ranks),
            self._took("all_reduce", b),
            key,
            names.REPLICATE,
        )

    def wait_reduce_scatter(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Wait for the reduce-scatter of sharded gradients, and add the result to the shard's gradients."""
        if len(b.reduce_ranks) > 1:
            yield WAIT, key, DATA, names.WAIT_GRADIENTS
        yield RUN, self._took("accumulate", b), DATA, names.ADD

    def widen(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Wait for a reduction, and convert its result to the dtype of gradients."""
        yield WAIT, key, DATA, names.WAIT_GRADIENTS
        if took := self._took("narrowed_shard", b):
            yield RUN, took, DATA, names.WIDEN

    def measure(self, b: Bucket) -> Op:
        """Sum the squares of this rank's gradients."""
        return RUN, self._took("squares", b), UPDATE, names.MEASURE

    def update(self, bucket: int) -> Iterator[Op]:
        """Update this rank's shard."""
        b = self.buckets[bucket]
        if b.offloaded:
            if self.streamed is None:
                self.streamed = StreamedUpdate(self)
            yield from self.streamed.update(bucket)
            return
        yield RUN, self._took("update", b), UPDATE, names.UPDATE
        if b.optimizer_kind.by_matrix:
            yield from self._matrices(b)

    def _matrices(self, b: Bucket) -> Iterator[Op]:
        """Muon: gather a bucket's matrices, orthogonalise this rank's own, and reduce them. All ranks wait for the rank
        whose matrices take longest, so this is the time of all."""
        wires, slowest = self.costs.matrices(b, self.streams.rank)
        run: Op = (RUN, ps(slowest), UPDATE, names.ORTHOGONALISE)
        there, back = (wires[:-1], wires[-1:]) if len(b.team) > 1 else (wires, wires[:0])
        for some in (there, (None,), back):
            for wire in some:
                yield from ((run,) if wire is None else self._at_once(wire[1], ps(wire[2]), names.of_matrices(wire[0])))

    def end(self) -> Iterator[Op]:
        """After the last update."""
        if self.streamed is not None:
            yield from self.streamed.end()
            self.streamed = None

    def all_reduce(self, a: StepAllReduce) -> tuple[Op, ...]:
        """All-reduce a few numbers, and wait for them."""
        ranks = self.streams.mesh.group(a.axis, self.streams.rank)
        if len(ranks) == 1:
            return ()
        took = self.costs.rates.collective("all_reduce", GroupSpan.of(ranks, self.costs.gpus_per_node), a.size)
        return self._at_once(ranks, ps(took), names.of_all_reduce(a))

    def _at_once(self, ranks: tuple[int, ...], took: int, name: str) -> tuple[Op, ...]:
        """A collective that is waited for at once."""
        key: Key = ("b", 0, 0)
        return (START, self.streams.of(ranks, UPDATE), took, key, name), (WAIT, key, UPDATE, name)

    def largest(self, b: Bucket) -> Op:
        """The largest absolute values of a shard's weights, for the scales of their quantised values."""
        return RUN, self._took("largest", b), DATA, names.LARGEST


@dataclass(slots=True)
class StreamedUpdate:
    """Optimizer states on the host are streamed through the device: one slice is copied in while the one before it is
    updated. It takes the staging buffer of the slice that left longest ago (`engine/optim/streamed.py`)."""

    ops: BucketOps
    staging: StagingBuffers = field(init=False)
    ahead: Iterator[tuple[int, int]] = field(init=False)  # bucket, elements
    coming: deque[list[Key]] = field(default_factory=deque[list[Key]])
    leaving: deque[list[Key]] = field(default_factory=deque[list[Key]])
    count: int = 0

    def __post_init__(self) -> None:
        """Size the staging buffers, and list the slices in the order of the update, the last bucket first."""
        buckets, policy = self.ops.buckets, self.ops.costs.policy
        self.staging = staging_buffers(((b, 1) for b in buckets), policy)
        self.ahead = iter([(i, n) for i in reversed(range(len(buckets))) for n in self._slices(buckets[i])])

    def update(self, bucket: int) -> Iterator[Op]:
        """Update a bucket, slice after slice."""
        if not self.coming:
            yield from self._fetch()
        for n in self._slices(self.ops.buckets[bucket]):
            now = self.coming.popleft()
            yield from self._fetch()
            yield from _waits(now)
            yield RUN, ps(self.ops.costs.update(self.ops.buckets[bucket], n)), UPDATE, names.UPDATE
            keys: list[Key] = []
            yield from self._copies("to_host", bucket, n, keys)
            self.leaving.append(keys)

    def end(self) -> Iterator[Op]:
        """Wait until all slices are back on the host."""
        while self.leaving:
            yield from _waits(self.leaving.popleft())

    def _slices(self, b: Bucket) -> list[int]:
        """The number of elements of each slice."""
        whole, each = b.shard_size, self.staging.elements
        return [min(each, whole - at) for at in range(0, whole, each)]

    def _fetch(self) -> Iterator[Op]:
        if (item := next(self.ahead, None)) is None:
            return
        if len(self.leaving) == self.staging.count - 1 > 0:
            yield from _waits(self.leaving.popleft())
        keys: list[Key] = []
        yield from self._copies("from_host", *item, keys)
        self.coming.append(keys)

    def _copies(self, op_name: Copy, bucket: int, n: int, keys: list[Key]) -> Iterator[Op]:
        b, policy, rates = self.ops.buckets[bucket], self.ops.costs.policy, self.ops.costs.rates
        for amount in optimizer_buffers(n, policy.keeping(b.moments), b.optimizer_kind):
            keys.append(("h", 0, self.count))
            self.count += 1
            yield START, OUT if op_name == "to_host" else IN, ps(rates.copy(op_name, amount)), keys[-1], op_name


def _waits(keys: Sequence[Key]) -> Iterator[Op]:
    return ((WAIT, key, HOST, "copy") for key in keys)


_WIRES = ("all_gather", "reduce_scatter", "all_reduce")

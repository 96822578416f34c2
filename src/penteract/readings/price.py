"""The price of one rank's step: bytes on every wire, FLOPs, and the bytes alive at every moment of the walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from penteract.config.layout import Elementwise
from penteract.config.precision.policy import Policy
from penteract.ops.collectives import payload
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import fp8_state_bytes, quantise_workspace
from penteract.ops.offload import OFFLOAD_OPS
from penteract.ops.spec import Dim, Received, Spec, Widths, room, size
from penteract.ops.tape import Call, Site
from penteract.parallel.data import Bucket
from penteract.readings.layers.expert_load import Balanced, Load
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Transfer
from penteract.step import muon, update
from penteract.step.all_reduces import StepAllReduce
from penteract.step.arena import plan_arena
from penteract.step.program import BufferKey, Program
from penteract.step.ring_buffer import gradient_ring_buffer, parameter_ring_buffer
from penteract.step.update import optimizer_state_bytes
from penteract.step.walk import Silent, walk
from penteract.units import Bytes, Flops

Wire = tuple[str, tuple[int, ...]]  # collective, the ranks of its group


@dataclass(slots=True)
class Price:
    """Memory, traffic and FLOPs of a step on one rank, counted exactly from the program.

    `wires`     bytes of each collective in each group; `redistributions`: the part of them that the model's own
                collectives send
    `resident`  bytes by kind that stay from step to step; `peak`: the most that is alive at once in addition to them
    `kept`      bytes alive after each action, in the order of the walk
    `host`      pinned bytes on the host, of activations and of optimizer states; `copied`: bytes copied to and from it
    `routed`    the most that registers of routed size take, outside the arena; modelled where the load is
    `arena`     the block in which registers get fixed offsets
    `workspace` the most that one kernel allocates outside the arena
    `outside`   the most that both take at once
    `peak_at`   the op that runs when `peak` is reached, as text
    """

    wires: Counter[Wire] = field(default_factory=Counter[Wire])
    redistributions: Counter[Wire] = field(default_factory=Counter[Wire])
    flops: Counter[str] = field(default_factory=Counter[str])
    resident: dict[str, Bytes] = field(default_factory=dict[str, Bytes])
    kept: list[tuple[str, Bytes]] = field(default_factory=list[tuple[str, Bytes]])
    peak: Bytes = 0
    arena: Bytes = 0
    workspace: Bytes = 0
    routed: Bytes = 0
    outside: Bytes = 0
    host: Bytes = 0
    copied: Counter[str] = field(default_factory=Counter[str])
    peak_at: str = ""

    @property
    def live(self) -> Bytes:
        """The most bytes of tensors alive at once, if every register had its own storage."""
        return sum(self.resident.values()) + self.peak

    @property
    def allocated(self) -> Bytes:
        """The most bytes of tensors allocated at once in training, with registers in the arena: at least `live`."""
        return sum(self.resident.values()) + self.arena + self.outside

    @property
    def total_flops(self) -> Flops:
        """FLOPs of all phases, and of the update."""
        return sum(self.flops.values())


@dataclass(slots=True)
class Pricing(Silent):
    """The reading that prices: a register is its number of bytes.

    `alive`  bytes of each register between the call that makes it and its `free`: (chunk, micro-batch), register
    `now`    their sum; `routed`: the part of it whose sizes are data, as they depend on where routers send tokens
    """

    p: Program
    load: Load
    price: Price = field(default_factory=Price)
    alive: dict[tuple[BufferKey, int], Bytes] = field(default_factory=dict[tuple[BufferKey, int], Bytes])
    now: Bytes = 0
    routed: Bytes = 0

    # ---- the walk --------------------------------------------------------------------------------------------

    def all_reduce(self, reduction: StepAllReduce) -> None:
        self._reduce_over(reduction.axis, reduction.size)

    def call(self, buffer: BufferKey, call: Call) -> None:
        site, specs = call.site, self.p.chunks[buffer[0]].specs
        if call.phase == "finish":
            return
        for r in call.outs:
            self._hold(buffer, r, self._bytes(specs[r], buffer))
        if site.op_name in OFFLOAD_OPS:
            self.price.copied[site.op_name] += self._bytes(site.ins[0]._replace(pinned=False), buffer)
            return
        if call.phase == "start":
            spec = payload(site.op_name, site.ins[0], site.outs[0])
            group, amount = self.p.mesh.group(str(site.attrs["axis"]), self.p.rank), self._bytes(spec, buffer)
            self.price.redistributions[site.op_name, group] += amount
            self._wire(site.op_name, group, amount)
            return
        ins = held = [tuple(self._size(d, buffer) for d in s.shape) for s in site.ins]
        if self.p.layout.pads_rows:
            held = [tuple(self._room(d, buffer) for d in s.shape) for s in site.ins]
        declaration = declaration_of(site, self.p.layout)
        self.price.flops[call.phase] += declaration.flops(call.phase, ins, site.weights, site.attrs)
        axis, n = declaration.all_reduced_max(call.phase, ins, site.weights, site.attrs)
        if n and self.p.mesh.size(axis) > 1:
            self.price.redistributions["all_reduce", self.p.mesh.group(axis, self.p.rank)] += n * FLOAT
            self._reduce_over(axis, n * FLOAT)
        self._note(declaration.workspace(call.phase, held, site.weights, site.attrs, self.p.widths), site)

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        for r in registers:
            amount = self.alive.pop((buffer, r))
            self.now -= amount
            self.routed -= amount * self._is_routed(buffer, r)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        for t, buffer, r in transfers:
            amount = self._bytes(self.p.chunks[buffer[0]].specs[r], buffer)
            if t.kind == "Recv":
                self._hold(buffer, r, amount)
            ends = (self.p.rank, self.p.mesh.neighbour(self.p.rank, t.peer))
            if ends[0] != ends[1]:
                self.price.wires[t.kind.lower(), ends] += amount
        self._note(0, None)

    def reduce(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if b.shards > 1:
            whole, shard = Spec((b.size,), "reduce"), Spec((b.shard_size,), "reduce")
            self._bucket_wire("reduce_scatter", b.shard_ranks, whole, shard)
        else:
            self.replicate(bucket)
        if b.summed:
            self._note(update.wire_workspace(b.size, self.p.precision), None)

    def replicate(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if len(b.replicate_ranks) > 1:
            self._bucket_wire("all_reduce", b.replicate_ranks, *[Spec((b.shard_size,), "reduce")] * 2)

    def after(self, action: Compute | Overlapped | P2PBatch) -> None:
        self.price.kept.append((str(action), self.now))

    def measure(self, bucket: int) -> None:
        self._note(update.norm_workspace(self.p.precision, self.p.layout.elementwise), None)

    def update(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if b.optimizer_kind.by_matrix:
            own = muon.own(b, self.p.rank)  # the matrices that this rank orthogonalises
            self.price.flops["update"] += muon.flops(b, own)
            for kind, group, amount in muon.wires(b, own, self.p.precision):
                self.price.wires[kind, group] += amount
        self.price.copied.update(dict.fromkeys(OFFLOAD_OPS, host_optimizer_bytes(b, self.p.precision)))
        self._note(update_workspace(b, self.p.precision, self.p.layout.elementwise), None)

    def gather(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        own, whole = Spec((b.shard_size,), b.gathered_as), Spec((b.size,), b.gathered_as)
        self._bucket_wire("all_gather", b.shard_ranks, own, whole)
        self._note(gather_workspace(b, self.p.layout.elementwise), None)

    def end(self) -> None:
        assert not self.alive, "registers outlive the step"

    # ---- counting --------------------------------------------------------------------------------------------

    def _size(self, dim: Dim, buffer: BufferKey) -> int:
        return size(dim, lambda layer: self.load.received(layer, buffer[1]))

    def _room(self, dim: Dim, buffer: BufferKey) -> int:
        return room(dim, lambda layer: self.load.received(layer, buffer[1]))

    def _bytes(self, spec: Spec, buffer: BufferKey) -> Bytes:
        if spec.pinned:
            return 0
        return prod(self._room(d, buffer) for d in spec.shape) * self.p.widths[spec.role]

    def _wire(self, kind: str, group: tuple[int, ...], amount: Bytes) -> None:
        """Count a collective. A shift is a send to the next rank of the ring and a receive from the previous one."""
        if kind == "shift":
            me = group.index(self.p.rank)
            self.price.wires["send", (self.p.rank, group[(me + 1) % len(group)])] += amount
            self.price.wires["recv", (self.p.rank, group[me - 1])] += amount
        else:
            self.price.wires[kind, group] += amount

    def _bucket_wire(self, kind: str, group: tuple[int, ...], x: Spec, y: Spec) -> None:
        spec = payload(kind, x, y)
        self.price.wires[kind, group] += spec.numel() * self.p.widths[spec.role]

    def _hold(self, buffer: BufferKey, register: int, amount: Bytes) -> None:
        self.alive[buffer, register] = amount
        self.now += amount
        self.routed += amount * self._is_routed(buffer, register)
        self.price.routed = max(self.price.routed, self.routed)
        self.price.outside = max(self.price.outside, self.routed)

    def _is_routed(self, buffer: BufferKey, register: int) -> bool:
        shape = self.p.chunks[buffer[0]].specs[register].shape
        return any(isinstance(d, Received) and not d.at_most for d in shape)

    def _note(self, workspace: Bytes, site: Site | None) -> None:
        """Raise the peaks if there are more bytes now, with a kernel's `workspace`. `site`: its op, if any."""
        self.price.workspace = max(self.price.workspace, workspace)
        self.price.outside = max(self.price.outside, self.routed + workspace)
        if self.now + workspace > self.price.peak:
            self.price.peak, self.price.peak_at = self.now + workspace, str(site or "the update")

    def _reduce_over(self, axis: str, amount: Bytes) -> None:
        if self.p.mesh.size(axis) > 1:
            self.price.wires["all_reduce", self.p.mesh.group(axis, self.p.rank)] += amount


def price(p: Program, load: Load | None = None, *, targets_counted: bool = True) -> Price:
    """Price a compiled step. `load`: how tokens spread over experts, balanced by default. `targets_counted`: as of
    `walk`."""
    reading = Pricing(p, load or Balanced.of(p.model, p.layout, p.sequence_length))
    walk(p, reading, targets_counted=targets_counted)
    reading.price.resident = resident(p)
    reading.price.arena = plan_arena(p).size
    if any(c.copies for c in p.chunks):
        reading.price.host = plan_arena(p, host=True).size
    reading.price.host += sum(host_optimizer_bytes(b, p.precision) for b in p.buckets)
    reading.price.copied = +reading.price.copied
    return reading.price


def resident(p: Program) -> dict[str, Bytes]:
    """Bytes by kind that a rank holds between steps."""
    seen = {name: c.tape.specs[v] for c in p.chunks for name, v in c.tape.inputs.items()}
    data = input_bytes(seen, p.layout.gradient_accumulation_steps, p.widths) + sum(map(fp8_state_bytes, p.fp8_sites))
    ring_buffers = ring_buffer_bytes(
        parameter_ring_buffer(p.buckets, p.layout, p.widths).size, gradient_ring_buffer(p.buckets, p.widths).size
    )
    return rank_bucket_bytes(((b, 1) for b in p.buckets), p.precision) | ring_buffers | {"data": data}


def rank_bucket_bytes(
    buckets_and_counts: Iterable[tuple[Bucket, int]],
    precision: Policy,
    parts: Iterable[Mapping[str, Bytes]] = (),
) -> dict[str, Bytes]:
    """Bytes by kind that a rank holds for its buckets and for the staging buffers of an offloaded optimizer.

    `buckets_and_counts`: each distinct bucket, and how many are equal to it; `parts`: the bytes of each of these
    buckets, if they are known.
    """
    total, every = Counter[str](), list(buckets_and_counts)
    for (_, n), part in zip(every, [*parts] or [bucket_bytes((b,), precision) for b, _ in every], strict=True):
        total.update({kind: n * amount for kind, amount in part.items()})
    staging = update.staging_buffers(every, precision)
    return dict(total) | {"optimizer": total["optimizer"] + staging.count * staging.each}


def host_optimizer_bytes(b: Bucket, precision: Policy) -> Bytes:
    """Bytes of optimizer states of a bucket on the host. They are copied to the device and back once a step."""
    return optimizer_state_bytes(b.shard_size, precision.keeping(b.moments), b.optimizer_kind) if b.offloaded else 0


def bucket_bytes(buckets: Iterable[Bucket], precision: Policy) -> dict[str, Bytes]:
    """Bytes of buckets by kind: parameters, gradients, optimizer states.

    Parameters and gradients of the whole bucket, padding included, or of the rank's shard where they are sharded.
    Optimizer states of the shard: moments, and master weights unless it updates the parameters themselves; none where
    they are on the host.
    """
    parameters = gradients = optimizer = 0
    for b in buckets:
        parameters += b.shard_size if b.cut_parameters else b.size
        gradients += b.shard_size if b.cut_gradients else b.size
        if not b.offloaded:
            optimizer += optimizer_state_bytes(b.shard_size, precision.keeping(b.moments), b.optimizer_kind)
    return {
        "parameters": parameters * precision.widths["parameter"],
        "gradients": gradients * precision.widths["gradient"],
        "optimizer": optimizer,
    }


def ring_buffer_bytes(parameters: Bytes, gradients: Bytes) -> dict[str, Bytes]:
    """Bytes of the two ring buffers in which ZeRO 2 and 3 hold unsharded units. Their offsets never change."""
    size = parameters + gradients
    return {"ring_buffer": size} if size else {}


def bucket_workspace(b: Bucket, precision: Policy, elementwise: Elementwise) -> Bytes:
    """The most that reducing, measuring, updating or gathering a bucket allocates."""
    wire = update.wire_workspace(b.size, precision) if b.summed else 0
    norm = update.norm_workspace(precision, elementwise)
    return max(wire, norm, update_workspace(b, precision, elementwise), gather_workspace(b, elementwise))


def gather_workspace(b: Bucket, elementwise: Elementwise) -> Bytes:
    """What gathering a bucket allocates."""
    return quantise_workspace(b.shard_size, elementwise) if b.gathered_as == "fp8" else 0


def update_workspace(b: Bucket, precision: Policy, elementwise: Elementwise) -> Bytes:
    """The most that updating a bucket allocates."""
    if b.optimizer_kind.by_matrix:
        return muon.workspace(b, precision, elementwise)
    return update.workspace(b.shard_size, precision.keeping(b.moments), elementwise, offloaded=b.offloaded)


def input_bytes(inputs: Mapping[str, Spec], num_micro_batches: int, widths: Widths) -> Bytes:
    """Bytes of input data: all micro-batches of the step, and index tensors once, as they never change."""
    copies = ((spec, 1 if name.startswith("index") else num_micro_batches) for name, spec in inputs.items())
    return sum(prod(spec.shape) * n * widths[spec.role] for spec, n in copies)  # type: ignore[misc]

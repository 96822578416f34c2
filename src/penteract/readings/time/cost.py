"""Seconds of each op of a step on its own: a call of the tape, a bucket event.

The time of compute follows from its matrix products and its memory traffic; that of a collective from the size of its
tensor and from how its group spans nodes. Waiting and overlap are the clock's concern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, lcm

from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.config.precision.policy import Policy
from penteract.ops.collectives import payload
from penteract.ops.declarations import OpDeclaration, declaration_of
from penteract.ops.declarations.declaration import FLOAT, CallShapes, Product
from penteract.ops.offload import OFFLOAD_OPS
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.parallel.direct import timed_as
from penteract.parallel.known_weights import found_by_pass
from penteract.parallel.matrix import Matrix, deal
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.layers.expert_load import Load
from penteract.readings.layers.layer_program import LayerProgram, attributes, bytes_of, shapes
from penteract.readings.layers.reads import Memo
from penteract.step import muon
from penteract.step.update import bytes_moved
from penteract.units import Bytes, Seconds

Part = str  # compute, attention, pointwise, launch, or the dimension whose traffic is waited for
DIMENSION: Mapping[str, Part] = {name: axis.dimension for name, axis in AXES.items() if axis.dimension}
ScaleReduce = tuple[str, Seconds]  # the all-reduce of a scale that a kernel needs first: its axis, its seconds
Cost = tuple[Part, Seconds, ScaleReduce | None]
CallCost = tuple[Part, Seconds, str, int]  # the same in any layout: the axis, how many scales are reduced over it first
CallKey = tuple[OpDeclaration, Site, Phase, Load, bool]
Wire = tuple[str, tuple[int, ...], Seconds]  # a collective, its ranks


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds of the calls of a rank: from rates, the size of a node, and the spread of its groups over nodes.

    adds    whether weight gradients are added to those of other micro-batches, or of other chunks of a loss. Where a
            step has several micro-batches, all are priced as those that add, though the first writes, and with ZeRO 2
            and 3 each. Of its only one, a second use of a weight in another layer (MTP's) is priced as written
    costs   cached seconds of calls, shared by layouts that choose the same implementation
    spans   cached spans of axes, shared by layouts; `own`: those of this one
    """

    rates: Rates
    widths: Widths
    mesh: Mesh
    gpus_per_node: int
    load: Load
    adds: bool = True
    costs: dict[CallKey, CallCost] = field(default_factory=dict[CallKey, CallCost])
    spans: Memo[GroupSpan] = field(default_factory=Memo[GroupSpan])
    own: dict[str, GroupSpan] = field(default_factory=dict[str, GroupSpan], compare=False)

    def span(self, axis: str) -> GroupSpan:
        """The span of an axis: that of its worst-placed group. Groups differ if their blocks of ranks and nodes do not
        divide each other."""
        if axis not in self.own:
            self.own[axis] = self.spans.ask(self.mesh.layout, axis, self._span, axis)
        return self.own[axis]

    def _span(self, axis: str, layout: Layout) -> GroupSpan:
        mesh, node = Mesh(layout), self.gpus_per_node
        block, _ = mesh.block(axis)
        aligned = block % node == 0 or node % block == 0
        ranks = (0,) if aligned else range(min(layout.world, lcm(block, node)))
        return max((GroupSpan.of(mesh.group(axis, r), node) for r in ranks), key=lambda s: s.nodes)

    def bytes_of(self, spec: Spec) -> Bytes:
        """Bytes of a value on the device; the load gives routed sizes."""
        return bytes_of(spec, self.widths, self.load)

    # ---- calls of the tape -----------------------------------------------------------------------------------

    def collective(self, site: Site) -> Seconds:
        """Seconds of a collective, or of a copy to or from the host, that the tape starts."""
        if site.op_name in OFFLOAD_OPS:
            return self.rates.copy(site.op_name, self.bytes_of(site.ins[0]._replace(pinned=False)))
        axis, size = str(site.attrs["axis"]), self.bytes_of(payload(site.op_name, site.ins[0], site.outs[0]))
        if site.op_name == "all_to_all_v":  # all wait for the fullest rank, which receives more than it sends
            size = max(size, self.bytes_of(site.outs[0]))
        span = self.span(axis)
        return self.rates.collective(timed_as(site.op_name, axis, self.mesh.layout, span.nodes), span, size)

    def call(self, site: Site, phase: Phase, specs: Mapping[int, Spec], registers: tuple[int, ...]) -> Cost:
        """The cost of a call, by the implementation that serves it."""
        declaration = declaration_of(site, self.mesh.layout)
        key = (declaration, site, phase, self.load, self.adds or phase != "weight_gradient")
        if (found := self.costs.get(key)) is None:
            found = self.costs[key] = self._call(declaration, site, phase, specs, registers)
        part, seconds, axis, n = found
        if not n or self.mesh.size(axis) == 1:
            return part, seconds, None
        return part, seconds, (axis, self.rates.collective("all_reduce", self.span(axis), n * FLOAT))

    def _call(
        self, declaration: OpDeclaration, site: Site, phase: Phase, specs: Mapping[int, Spec],
        registers: tuple[int, ...],
    ) -> CallCost:  # fmt: skip
        padding = not declaration.counts_rows  # it moves rows that did not come, too
        ins, attrs = shapes(site, self.load, room=padding), attributes(site, self.load, room=padding)
        room = None if padding else shapes(site, self.load, room=True)
        call = CallShapes(phase, ins, site.weights, attrs, self.adds, room)
        part, seconds = declaration.cost(
            self.rates, call, self.widths,
            lambda: [bytes_of(specs[r], self.widths, self.load, room=padding) for r in registers],
        )  # fmt: skip
        return part, seconds, *declaration.all_reduced_max(phase, call.ins, site.weights, site.attrs)


def seconds_alone(layer: LayerProgram, device: DeviceCosts) -> dict[int, Seconds]:
    """Seconds of each call of a forward pass without any overlap, by the index of its site; collectives included."""
    found = dict[int, Seconds]()
    for job, ins, outs in layer.outline.calls["Fwd"]:
        place, phase = layer.outline.jobs[job]
        site = layer.sites[place]
        if phase == "forward":
            found[place] = device.call(site, phase, layer.specs, (*ins, *outs))[1]
        elif phase == "start" and site.op_name not in OFFLOAD_OPS:
            found[place] = device.collective(site)
    return found


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """Seconds of bucket events."""

    rates: Rates
    policy: Policy
    gpus_per_node: int

    def on_wire(self, kind: str, b: Bucket) -> Seconds:
        """One collective of a bucket: over its shard group, or for an all-reduce over its replicate group."""
        role = b.gathered_as if kind == "all_gather" else "reduce"
        whole, shard = Spec((b.size,), role), Spec((b.shard_size,), role)
        ends = {"all_gather": (shard, whole), "reduce_scatter": (whole, shard), "all_reduce": (shard, shard)}[kind]
        wire, group = payload(kind, *ends), b.replicate_ranks if kind == "all_reduce" else b.shard_ranks
        amount = wire.numel() * self.policy.widths[wire.role]
        return self.rates.collective(kind, GroupSpan.of(group, self.gpus_per_node), amount)

    def narrowed(self, b: Bucket) -> Seconds:
        """Casting gradients to the dtype of the reduction; 0 if it is the same."""
        return self._narrowed(b.size)

    def narrowed_shard(self, b: Bucket) -> Seconds:
        """The same for this rank's shard, in either direction."""
        return self._narrowed(b.shard_size)

    def _narrowed(self, elements: int) -> Seconds:
        p = self.policy
        moved = elements * (p.widths["gradient"] + p.widths["reduce"])
        return self.rates.moved(moved) if p.reduce != p.gradient else 0.0

    def accumulate(self, b: Bucket) -> Seconds:
        """Adding a reduced gradient to the shard's gradient."""
        w = self.policy.widths
        return self.rates.moved(b.shard_size * (2 * w["gradient"] + w["reduce"]))

    def squares(self, b: Bucket) -> Seconds:
        """Reading this rank's gradients for the norm."""
        return self.rates.moved(b.shard_size * self.policy.widths["gradient"])

    def quantise(self, b: Bucket) -> Seconds:
        """Quantising a shard to FP8: the shard is read, the quantised values are written."""
        w = self.policy.widths
        return self.rates.moved(b.shard_size * (w["parameter"] + w["fp8"]))

    def largest(self, b: Bucket) -> Seconds:
        """Reading a shard for the largest absolute values of its weights."""
        return self.rates.moved(b.shard_size * self.policy.widths["parameter"])

    def update(self, b: Bucket, elements: int = 0) -> Seconds:
        """Updating this rank's parameters of a bucket, or `elements` of them; without Muon's matrix products. What
        its kernel cannot find of weights that are cast to FP8 is read again for their largest values."""
        p, n = self.policy, elements or b.shard_size
        read = n * p.widths["gradient"]  # counted in `squares`
        every = muon.bytes_moved(b, p) if b.optimizer_kind.by_matrix else bytes_moved(n, p.keeping(b.moments))
        found = found_by_pass(b.known_weights, b.optimizer_kind) * n // b.shard_size * p.widths["parameter"]
        return self.rates.update(every - read) + (self.rates.moved(found) if found else 0)

    def matrices(self, b: Bucket, rank: int) -> tuple[Sequence[Wire], Seconds]:
        """Muon's update of a bucket's matrices: a rank's collectives, and the seconds of the slowest rank's products,
        and of its passes between them."""
        hands = deal(b.matrices, len(b.team))
        wires = [
            (w.kind, w.group, self.rates.collective(w.kind, GroupSpan.of(w.group, self.gpus_per_node), w.amount))
            for w in muon.wires(b, hands[b.team.index(rank)], self.policy)
        ]
        return wires, max(self._orthogonalise(b, hand) for hand in hands)

    def _orthogonalise(self, b: Bucket, some: tuple[Matrix, ...]) -> Seconds:
        made = Counter(product for m in some for product in muon.products(m))
        moved = Counter(muon.passes(b, some, self.policy))
        products = (b.optimizer_kind.steps * n * self.rates.product(Product(1, *one)) for one, n in made.items())
        return fsum([*products, *(n * self.rates.moved(amount) for amount, n in moved.items())])

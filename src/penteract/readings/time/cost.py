"""What each thing that a step does takes alone: a call of the tape, what happens to a bucket, a message.

Compute is priced by the products and the bytes of its operation, a collective by the tensor that it moves and by how
its group lies on nodes. Who waits for whom is the clock's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, lcm

from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.config.precision.policy import Policy
from penteract.ops.collectives import counted
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.declaration import FLOAT, CallShapes, Product
from penteract.ops.offload import OFFLOAD_OPS
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.parallel.matrix import Matrix, deal
from penteract.readings.costs.rates import GroupSpan, Rates
from penteract.readings.layers.expert_load import Load
from penteract.readings.layers.layer_program import LayerProgram, bytes_of, shapes
from penteract.readings.layers.reads import Memo
from penteract.step import muon
from penteract.step.update import bytes_moved
from penteract.units import Bytes, Seconds

Part = str  # compute, attention, pointwise, launch, or the dimension whose traffic is waited for
DIMENSION: Mapping[str, Part] = {name: axis.dimension for name, axis in AXES.items() if axis.dimension}
Asked = tuple[str, Seconds]  # over which axis a kernel asks other ranks for a scale first, and how long that takes
Cost = tuple[Part, Seconds, Asked | None]
Wire = tuple[str, tuple[int, ...], Seconds]  # a collective, its ranks


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What a rank runs on: rates, the width of a node, and the spread of its groups over nodes.

    costs   of calls and collectives that other layouts share
    spans   of axes
    """

    rates: Rates
    widths: Widths
    mesh: Mesh
    gpus_per_node: int
    load: Load
    costs: Memo[Cost] = field(default_factory=Memo[Cost])
    spans: Memo[GroupSpan] = field(default_factory=Memo[GroupSpan])

    def span(self, axis: str) -> GroupSpan:
        """Of the group that lies worst. Where blocks of ranks and nodes do not divide, groups lie differently."""
        return self.spans.ask(self.mesh.layout, axis, self._span, axis)

    def _span(self, axis: str, layout: Layout) -> GroupSpan:
        mesh, node = Mesh(layout), self.gpus_per_node
        block, _ = mesh.block(axis)
        aligned = block % node == 0 or node % block == 0
        ranks = (0,) if aligned else range(min(layout.world, lcm(block, node)))
        return max((GroupSpan.of(mesh.group(axis, r), node) for r in ranks), key=lambda s: s.nodes)

    def bytes_of(self, spec: Spec) -> Bytes:
        """Bytes of a value on the device; routed sizes are those of the load."""
        return bytes_of(spec, self.widths, self.load)

    # ---- calls of the tape -----------------------------------------------------------------------------------

    def collective(self, site: Site) -> Seconds:
        """One that the tape starts."""
        if site.op_name in OFFLOAD_OPS:
            return self.rates.copy(site.op_name, self.bytes_of(site.ins[0]._replace(pinned=False)))
        axis, spec = str(site.attrs["axis"]), counted(site.op_name, site.ins[0], site.outs[0])
        return self.rates.collective(site.op_name, self.span(axis), self.bytes_of(spec))

    def call(self, site: Site, phase: Phase, specs: Mapping[int, Spec], registers: tuple[int, ...]) -> Cost:
        """As the implementation that computes it has it."""
        key = (site, phase, self.load)
        return self.costs.ask(self.mesh.layout, key, self._call, site, phase, specs, registers)

    def _call(
        self, site: Site, phase: Phase, specs: Mapping[int, Spec], registers: tuple[int, ...], layout: Layout
    ) -> Cost:  # fmt: skip
        """As the layout shows it. Few sites look at it: those whose op has more than one implementation."""
        call, declaration = (
            CallShapes(phase, shapes(site, self.load), site.weights, site.attrs),
            declaration_of(site, layout),
        )
        axis, n = declaration.agreed(phase, call.ins, site.weights, site.attrs)
        part, seconds = declaration.cost(
            self.rates, call, self.widths, lambda: [self.bytes_of(specs[r]) for r in registers]
        )
        if not n or Mesh(layout).size(axis) == 1:
            return part, seconds, None
        return part, seconds, (axis, self.rates.collective("all_reduce", self._span(axis, layout), n * FLOAT))


def seconds_alone(piece: LayerProgram, device: DeviceCosts) -> dict[int, Seconds]:
    """Of each call of a forward, by the place of its site: as if nothing else ran, collectives too."""
    found = dict[int, Seconds]()
    for job, ins, outs in piece.outline.calls["Fwd"]:
        place, phase = piece.outline.jobs[job]
        site = piece.sites[place]
        if phase == "forward":
            found[place] = device.call(site, phase, piece.specs, (*ins, *outs))[1]
        elif phase == "start" and site.op_name not in OFFLOAD_OPS:
            found[place] = device.collective(site)
    return found


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """Seconds of what happens to a bucket."""

    rates: Rates
    policy: Policy
    gpus_per_node: int

    def on_wire(self, kind: str, b: Bucket) -> Seconds:
        """One collective on a bucket: over those who share it, or over the replicas of a shard."""
        role = b.gathered_as if kind == "all_gather" else "reduce"
        whole, shard = Spec((b.size,), role), Spec((b.shard_size,), role)
        ends = {"all_gather": (shard, whole), "reduce_scatter": (whole, shard), "all_reduce": (shard, shard)}[kind]
        wire, group = counted(kind, *ends), b.replicate_ranks if kind == "all_reduce" else b.shard_ranks
        amount = wire.numel() * self.policy.widths[wire.role]
        return self.rates.collective(kind, GroupSpan.of(group, self.gpus_per_node), amount)

    def narrowed(self, b: Bucket) -> Seconds:
        """Of gradients put in the dtype of the wire, where that is another."""
        return self._narrowed(b.size)

    def narrowed_shard(self, b: Bucket) -> Seconds:
        """The same of this rank's shard, or back."""
        return self._narrowed(b.shard_size)

    def _narrowed(self, elements: int) -> Seconds:
        p = self.policy
        moved = elements * (p.widths["gradient"] + p.widths["reduce"])
        return self.rates.moved(moved) if p.reduce != p.gradient else 0.0

    def landed(self, b: Bucket) -> Seconds:
        """Of a sum that is added to the shard's."""
        w = self.policy.widths
        return self.rates.moved(b.shard_size * (2 * w["gradient"] + w["reduce"]))

    def squares(self, b: Bucket) -> Seconds:
        """Of this rank's gradients, read for the norm."""
        return self.rates.moved(b.shard_size * self.policy.widths["gradient"])

    def coded(self, b: Bucket) -> Seconds:
        """Of making a shard codes of FP8: it is read, and they are written."""
        w = self.policy.widths
        return self.rates.moved(b.shard_size * (w["parameter"] + w["code"]))

    def largest(self, b: Bucket) -> Seconds:
        """Of a shard, read for its weights' largest values."""
        return self.rates.moved(b.shard_size * self.policy.widths["parameter"])

    def update(self, b: Bucket, elements: int = 0) -> Seconds:
        """Of moving a bucket's parameters, or `elements` of this rank's; but for what its matrices take."""
        p, n = self.policy, elements or b.shard_size
        read = n * p.widths["gradient"]  # for the norm, which is not the update's
        every = muon.bytes_moved(b, p) if b.optimizer_kind.by_matrix else bytes_moved(n, p.keeping(b.moments))
        return self.rates.update(every - read)

    def matrices(self, b: Bucket, rank: int) -> tuple[Sequence[Wire], Seconds]:
        """What a rank puts on wires to move the matrices of a bucket; and the products of the rank whose own take
        longest."""
        hands = deal(b.matrices, len(b.team))
        wires = [
            (w.kind, w.group, self.rates.collective(w.kind, GroupSpan.of(w.group, self.gpus_per_node), w.amount))
            for w in muon.wires(b, hands[b.team.index(rank)], self.policy)
        ]
        return wires, max(self._products(b, hand) for hand in hands)

    def _products(self, b: Bucket, some: tuple[Matrix, ...]) -> Seconds:
        made = Counter(product for m in some for product in muon.products(m))
        return fsum(b.optimizer_kind.steps * n * self.rates.product(Product(1, *one)) for one, n in made.items())

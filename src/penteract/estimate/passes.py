"""What the passes of pipeline ranks take, each chunk a chain of pieces; and what a step takes at least by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from penteract.estimate.composed import Chains, Composer
from penteract.estimate.link import waits as waits_of
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import Kind, Sight, sight
from penteract.estimate.pipeline import Passes, least
from penteract.estimate.rates import Rates
from penteract.estimate.stages import Chain
from penteract.estimate.timing import Device, Part, Timed, time_piece
from penteract.ops.tape import Site
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.units import Seconds

Shape = tuple[object, ...]  # what decides what is known of several layouts
Ways = list[tuple[Seconds, Seconds, Seconds]]


@dataclass(slots=True)
class PassTimes:
    """Times passes at `rates`. What two layouts share is timed once."""

    composer: Composer
    cluster: Cluster
    rates: Rates
    _pieces: dict[tuple[str, Sight], Timed] = field(default_factory=dict[tuple[str, Sight], Timed])
    _costs: dict[tuple[Site, str], tuple[Part, Seconds]] = field(
        default_factory=dict[tuple[Site, str], tuple[Part, Seconds]]
    )
    _chains: dict[Sight, dict[Chain, Mapping[str, Seconds]]] = field(
        default_factory=dict[Sight, dict[Chain, Mapping[str, Seconds]]]
    )
    _passes: dict[Shape, tuple[Passes, ...]] = field(default_factory=dict[Shape, tuple[Passes, ...]])
    _ways: dict[Shape, Ways] = field(default_factory=dict[Shape, Ways])
    _shares: dict[Shape, tuple[Passes, ...]] = field(default_factory=dict[Shape, tuple[Passes, ...]])
    _best: PassTimes | None = None

    def timed(self, kind: Kind, layout: Layout, seen: Sight) -> Timed:
        key = (kind.name, self.composer.recorder.sight_of(kind, layout, seen))
        if key not in self._pieces:
            self._pieces[key] = time_piece(self.composer.piece(kind, layout, seen), self.device(layout))
        return self._pieces[key]

    def device(self, layout: Layout) -> Device:
        """What a pass runs on."""
        load, node = Balanced.of(self.composer.model, layout, self.composer.sequence_length), self.cluster.gpus_per_node
        return Device(self.rates, self.composer.widths, Mesh(layout), node, load, self._costs)

    def seconds(self, layout: Layout, seen: Sight) -> Callable[[Kind], Mapping[str, Seconds]]:
        """Of each action of a piece."""
        return lambda kind: self.timed(kind, layout, seen).seconds

    def of(self, layout: Layout, seen: Sight) -> tuple[Passes, ...]:
        key = (seen, layout.pp, layout.vpp)
        if key not in self._passes:
            known, deal = self._chains.setdefault(seen, {}), self.composer.deal(layout)
            for chain in {chain for ranks in deal.alike for chain in deal.by_rank[ranks[0]]}:
                if chain not in known:
                    known[chain] = self._pass(chain, layout, seen)
            own = (deal.by_rank[ranks[0]] for ranks in deal.alike)
            self._passes[key] = tuple(tuple([known[chain] for chain in chains]) for chains in own)
        return self._passes[key]

    def _pass(self, chain: Chain, layout: Layout, seen: Sight) -> Mapping[str, Seconds]:
        total = dict[str, Seconds]()
        for kind, n in chain:
            for action, seconds in self.timed(kind, layout, seen).seconds.items():
                total[action] = total.get(action, 0.0) + n * seconds
        return self.waited((total,), (chain,), layout, seen)[0]

    def waited(self, passes: Passes, chains: Chains, layout: Layout, seen: Sight) -> Passes:
        """With what they wait for the host."""
        if not layout.offload:
            return passes
        late = [self.waits(chain, layout, seen) for chain in chains]
        return tuple(
            {a: s + wait.get(a, 0.0) for a, s in times.items()} for times, wait in zip(passes, late, strict=True)
        )

    def waits(self, chain: Chain, layout: Layout, seen: Sight) -> dict[str, Seconds]:
        """What a pass waits for copies to and from the host, by action."""
        if not layout.offload:
            return {}
        return waits_of([timed for kind, n in chain for timed in [self.timed(kind, layout, seen)] * n])

    def ways(self, layout: Layout, passes: tuple[Passes, ...], known: Shape) -> Ways:
        """Of each group of pipeline ranks with the same stages: the work of one, the longest way through it, and what
        of the work comes after the last forward."""
        lay = layout
        key = (known, lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, lay.dp)
        if key not in self._ways:
            deal = self.composer.deal(lay)
            by_rank = least(lay.gradient_accumulation_steps, [passes[g] for g in deal.group], self.wire(lay))
            self._ways[key] = [
                (
                    max([by_rank[r][0] for r in ranks]),
                    max([by_rank[r][1] for r in ranks]),
                    fsum([t for times in chunks for action, t in times.items() if action != "Fwd"]),
                )
                for ranks, chunks in zip(deal.alike, passes, strict=True)
            ]
        return self._ways[key]

    def wire(self, layout: Layout) -> Seconds:
        """Of a message between stages, over the slowest border."""
        lay = layout
        if lay.pp == 1:
            return 0.0
        rows = self.composer.sequence_length // lay.cp // lay.tp * lay.micro_batch_size
        amount = rows * self.composer.model.hidden_size * self.composer.widths["compute"]
        return self.rates.send(amount, across=lay.world > self.cluster.gpus_per_node)

    def at_least(self, layout: Layout) -> Seconds:
        """A lower bound of the step's time from its passes alone, whatever state is cut and gradients take."""
        seen = sight(layout)
        return max([max(own, way) for own, way, _ in self.ways(layout, self.of(layout, seen), (seen,))])

    def roughly(self, layout: Layout, largest: int) -> Seconds:
        """The same, lower, for any micro-batch of up to `largest` sequences from one look at that size.

        At the best rates the seconds of a call fall for each sequence as micro-batches grow, and so do those of a pass,
        which is made of their sums and maxima. A loss in one chunk is no dearer than one in many.
        """
        if self._best is None:
            self._best = PassTimes(self.composer, self.cluster, self.rates.at_best())
        chunk = self.composer.sequence_length * largest if layout.loss == "chunked" else 0
        at, share = replace(layout, micro_batch_size=largest, loss_chunk=chunk), layout.micro_batch_size / largest
        seen = sight(at)
        key = (seen, layout.pp, layout.vpp, layout.micro_batch_size)
        if key not in self._shares:
            self._shares[key] = tuple(
                tuple([{action: share * s for action, s in times.items()} for times in chunks])
                for chunks in self._best.of(at, seen)
            )
        return max([max(own, way) for own, way, _ in self.ways(layout, self._shares[key], ("rough", *key))])

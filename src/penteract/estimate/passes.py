"""What the passes of pipeline ranks take, each chunk a chain of pieces; and what a step takes at least by that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from penteract.estimate.composed import Composer
from penteract.estimate.deal import Chains
from penteract.estimate.link import waits as waits_of
from penteract.estimate.load import Balanced
from penteract.estimate.pieces import Kind, Piece
from penteract.estimate.pipeline import Passes, least
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reads import Memo, Memos, changed, tracked
from penteract.estimate.reduction import Times
from penteract.estimate.stages import Chain
from penteract.estimate.timing import Device, Part, Timed, time_piece
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.units import Seconds


class Way(NamedTuple):
    """Of a group of pipeline ranks with the same stages: the work of one, the longest way through it, and what of the
    work comes after the last forward."""

    work: Seconds
    way: Seconds
    last: Seconds


@dataclass(slots=True)
class PassTimes:
    """Times passes at `rates`. What two layouts share is timed once."""

    composer: Composer
    cluster: Cluster
    rates: Rates
    memos: Memos = field(default_factory=Memos)
    _costs: Memo[tuple[Part, Seconds]] = field(default_factory=Memo[tuple[Part, Seconds]])
    _spans: Memo[Span] = field(default_factory=Memo[Span])
    _best: PassTimes | None = None

    def timed(self, layout: Layout, kind: Kind) -> Timed:
        return self._timed(layout, self.composer.piece(layout, kind))

    @tracked
    def _timed(self, layout: Layout, piece: Piece) -> Timed:
        return time_piece(piece, self.device(layout))

    def device(self, layout: Layout) -> Device:
        """What a pass runs on."""
        load, node = Balanced.of(self.composer.model, layout, self.composer.sequence_length), self.cluster.gpus_per_node
        return Device(self.rates, self.composer.widths, Mesh(layout), node, load, self._costs, self._spans)

    def seconds(self, layout: Layout) -> Times:
        """Of each action of a piece."""
        known = dict[Kind, Mapping[str, Seconds]]()

        def of(kind: Kind) -> Mapping[str, Seconds]:
            if kind not in known:
                known[kind] = self.timed(layout, kind).seconds
            return known[kind]

        return of

    @tracked
    def of(self, layout: Layout) -> tuple[Passes, ...]:
        """By group of pipeline ranks with the same stages: what a micro-batch takes in each chunk."""
        deal, seconds = self.composer.deal(layout), self.seconds(layout)
        return tuple(deal.dealt([self._pass(chain, layout, seconds) for chain in deal.chains]))

    def _pass(self, chain: Chain, layout: Layout, times: Times) -> Mapping[str, Seconds]:
        total = dict[str, Seconds]()
        for kind, n in chain:
            for action, seconds in times(kind).items():
                total[action] = total.get(action, 0.0) + n * seconds
        return self.waited((total,), (chain,), layout)[0]

    def waited(self, passes: Passes, chains: Chains, layout: Layout) -> Passes:
        """With what they wait for the host."""
        if not layout.offload:
            return passes
        late = [self.waits(chain, layout) for chain in chains]
        return tuple(
            {a: s + wait.get(a, 0.0) for a, s in times.items()} for times, wait in zip(passes, late, strict=True)
        )

    def waits(self, chain: Chain, layout: Layout) -> dict[str, Seconds]:
        """What a pass waits for copies to and from the host, by action."""
        if not layout.offload:
            return {}
        return waits_of([timed for kind, n in chain for timed in [self.timed(layout, kind)] * n])

    def ways(self, layout: Layout) -> list[Way]:
        """By the passes alone."""
        return self.ways_of(layout, self.of(layout))

    def ways_of(self, layout: Layout, passes: tuple[Passes, ...]) -> list[Way]:
        """By group of pipeline ranks with the same stages."""
        found = least(layout.gradient_accumulation_steps, passes, self.composer.deal(layout).group, self.wire(layout))
        after = [fsum([t for times in chunks for action, t in times.items() if action != "Fwd"]) for chunks in passes]
        return [Way(own, way, last) for (own, way), last in zip(found, after, strict=True)]

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
        return _longest(self.ways(layout))

    def roughly(self, layout: Layout, largest: int) -> Seconds:
        """The same, lower, for any micro-batch of up to `largest` sequences from one look at that size.

        At the best rates the seconds of a call fall for each sequence as micro-batches grow, and so do those of a pass,
        which is made of their sums and maxima. A loss in one chunk is no dearer than one in many.
        """
        if self._best is None:
            self._best = PassTimes(self.composer, self.cluster, self.rates.at_best())
        chunk = self.composer.sequence_length * largest if layout.loss == "chunked" else 0
        at, share = changed(layout, micro_batch_size=largest, loss_chunk=chunk), layout.micro_batch_size / largest
        passes = self._best.of(at)
        distinct = {id(times): times for chunks in passes for times in chunks}
        part = {i: {action: share * s for action, s in times.items()} for i, times in distinct.items()}
        return _longest(self.ways_of(layout, tuple([tuple([part[id(t)] for t in chunks]) for chunks in passes])))


def _longest(ways: list[Way]) -> Seconds:
    return max([max(own, way) for own, way, _ in ways])

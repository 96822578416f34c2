"""The time of a step: the program of every pipeline rank, played by the clock for two steps. The second is reported,
as it begins with what the first has left under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.estimate.composed import Composer
from penteract.estimate.load import Balanced
from penteract.estimate.packed import first_rank
from penteract.estimate.pieces import Kind, Piece
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reads import Memo
from penteract.estimate.time.clock import PART, PS, ps
from penteract.estimate.time.cost import BucketCosts, Cost, Device
from penteract.estimate.time.derive import Derived, derive
from penteract.estimate.time.machine import Clock, Log
from penteract.estimate.time.ops import DATA, ActionOps, BucketOps, Streams, piece_ops
from penteract.estimate.time.ranks import Line, Ranks, Unsettled, line_of, turn_of
from penteract.estimate.time.stage import Stage
from penteract.ops.bodies.fp8 import is_coded, remembered
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket, bucket_of
from penteract.schedule.in_flight import steady
from penteract.spec.hardware import Cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec
from penteract.step.agreements import after_backward, at_begin, totals
from penteract.step.ring import places

_TURNS = 4  # of a schedule that are played before others are jumped


class Ends(NamedTuple):
    """What decides a rank's work outside of the tape (`step/agreements.py`)."""

    model: ModelSpec
    rank: int
    widths: Widths
    buckets: Sequence[Bucket]
    coded: Sequence[Site]
    delayed: Sequence[Site]
    balanced: Sequence[str]


@dataclass(slots=True)
class StepClock:
    """Plays steps of layouts of one model on one cluster."""

    composer: Composer
    cluster: Cluster
    rates: Rates
    jumps: bool = True
    log: Log | None = None  # of all that is played, where nothing is to be left out or remembered
    costs: Memo[Cost] = field(default_factory=Memo[Cost])
    spans: Memo[Span] = field(default_factory=Memo[Span])
    clocks: dict[tuple[int, ...], Clock] = field(default_factory=dict[tuple[int, ...], Clock])

    def ranks(self, layout: Layout) -> Ranks:
        """Two steps of all pipeline ranks, played."""
        turns = _TURNS
        while True:
            ranks = self.build(layout, turns if self.jumps else 0)
            try:
                ranks.step()
                ranks.step()
            except Unsettled:
                turns *= 2
            else:
                return ranks

    def seconds(self, layout: Layout) -> float:
        """Of a step."""
        ends = self.ranks(layout).ends
        return (ends[1] - ends[0]) / PS

    # ---- the program -----------------------------------------------------------------------------------------

    def build(self, layout: Layout, turns: int) -> Ranks:
        lay = layout
        micros, skipped = _shortened(lay, turns)
        line = line_of(lay.schedule, lay.pp, lay.vpp, micros)
        deal, made = self.composer.deal(lay), dict[int, Stage]()
        derived = list[Derived]()
        node, each = self.cluster.gpus_per_node, lay.world // lay.pp
        alike = each % node == 0 or node % each == 0  # all stages lie on nodes alike
        stages = list[Stage]()
        for r in range(lay.pp):
            group = deal.group[r] if alike else -1 - r
            if group not in made:
                made[group] = self.stage(lay, r)
            stages.append(made[group])
            derived.append(derive(stages[-1], line.computes[r]))
        return Ranks(line, stages, derived, self._wires(lay, line), ps(self.rates.launch), skipped, self.jumps)

    def _wires(self, layout: Layout, line: Line) -> list[int]:
        """Of each message."""
        lay, node = layout, self.cluster.gpus_per_node
        if lay.pp == 1:
            return []
        rows = self.composer.sequence_length // lay.cp // lay.tp * lay.micro_batch_size
        amount = rows * self.composer.model.hidden_size * self.composer.widths["compute"]
        each, known = lay.world // lay.pp, dict[tuple[int, int, bool], int]()
        out = list[int]()
        for m in line.messages:
            way = (m.source, m.target, m.both)
            if way not in known:
                across = any((m.source * each + i) // node != (m.target * each + i) // node for i in range(each))
                kind = "shift" if m.both else "send"
                known[way] = ps(self.rates.collective(kind, Span(2, 1 + across), amount))
            out.append(known[way])
        return out

    def device(self, layout: Layout) -> Device:
        """What a rank's passes run on."""
        load, node = Balanced.of(self.composer.model, layout, self.composer.sequence_length), self.cluster.gpus_per_node
        return Device(self.rates, self.composer.widths, Mesh(layout), node, load, self.costs, self.spans)

    def stage(self, layout: Layout, r: int) -> Stage:
        """The program of the ranks of pipeline coordinate `r`."""
        lay, mesh = layout, Mesh(layout)
        rank, packer = first_rank(mesh, r), self.composer.packer
        streams = Streams(mesh, rank)
        placed, packs, device = packer.placed(lay, r), tuple(packer.packs(lay, r)), self.device(lay)
        pieces = dict[Kind, tuple[Piece, dict[str, ActionOps]]]()
        for kind in dict.fromkeys(kind for kind, _ in placed):
            piece = self.composer.piece(lay, kind)
            pieces[kind] = piece, dict(piece_ops(piece, device, streams))
        known = dict[object, Bucket]()
        buckets = list[Bucket]()
        for pack in packs:
            key = (pack.alike, pack.elements, pack.unit < 0, pack.shapes)
            if key not in known:
                known[key] = bucket_of(pack, mesh, rank)
            buckets.append(known[key])
        ops = BucketOps(buckets, BucketCosts(self.rates, self.composer.policy, self.cluster.gpus_per_node), streams)
        ends, chunks = 0, list[range]()
        for chain in self.composer.chains_of(lay, r):
            chunks.append(range(ends, ends := ends + sum(n for _, n in chain)))
        row = [kind for kind, _ in placed]
        outside = self._ends(rank, row, pieces, buckets)
        for agreement in (*at_begin(outside, counted=True), *after_backward(outside), totals(outside)):
            if len(group := mesh.group(agreement.axis, rank)) > 1:
                streams.of(group, PART["update"])
        for b in known.values():
            _streams(ops, b)
        owner = tuple(streams.parts)
        if owner not in self.clocks:
            slower = round((self.rates.beside - 1) * 10**6)
            self.clocks[owner] = Clock(
                ps(self.rates.launch), slower, owner, jumps=self.jumps, remembers=self.log is None, log=self.log
            )  # fmt: skip
        return Stage(self.clocks[owner], ops, row, chunks, pieces, packs, buckets, [params for _, params in placed],
                     places(lay, len(row)), outside, bool(lay.offload))  # fmt: skip

    def _ends(
        self, rank: int, row: Sequence[Kind], pieces: Mapping[Kind, tuple[Piece, object]],
        buckets: Sequence[Bucket],
    ) -> Ends:  # fmt: skip
        """What decides a rank's work outside of the tape."""
        asked = self.composer.policy.fp8 is not None or self.composer.model.moe is not None
        sites = [site for kind in row for site in pieces[kind][0].sites] if asked else []
        kept = [site for site in sites if remembered(site)]
        coded, delayed = [s for s in kept if is_coded(s)], [s for s in kept if not is_coded(s)]
        balanced = [str(s.attrs["name"]) for s in sites if s.word == "tally"]
        model, widths = self.composer.model, self.composer.widths
        return Ends(model, rank, widths, buckets, coded, delayed, balanced)


def _streams(ops: BucketOps, b: Bucket) -> None:
    """Of all that a bucket is moved over, so that a clock knows every stream of its ranks."""
    for ranks in (b.sharers, b.replicas, b.peers):
        if len(ranks) > 1:
            ops.streams.of(ranks, DATA)


def _shortened(layout: Layout, turns: int) -> tuple[int, int]:
    """Micro-batches that are played, and turns that are jumped: a multiple of four, as rings and uneven ranks may
    need a few turns to come round. Where all goes forward before anything goes back, a turn is of one half alone."""
    lay, m = layout, layout.gradient_accumulation_steps
    turn = turn_of(lay.pp, lay.vpp)
    spare = (m - steady(lay.pp, lay.vpp) - lay.pp) // turn - turns
    if not turns or lay.schedule == "afab" or spare < 4:
        return m, 0
    return m - spare // 4 * 4 * turn, spare // 4 * 4

"""What one rank sends in a step: for each of its groups the calls, the bytes and the seconds of each collective.

Bytes are those of the price, event by event. Seconds are those that the simulated clock gives the same calls, each on
its own: how long a group's links are busy, hidden behind compute or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.ops.declarations import declaration_of
from penteract.ops.tape import Call
from penteract.readings.costs.rates import GroupSpan
from penteract.readings.layers.layer_program import shapes
from penteract.readings.price import Pricing
from penteract.readings.time.clock import ps
from penteract.readings.time.cost import BucketCosts, DeviceCosts
from penteract.readings.time.numbered_schedule import numbered_schedule
from penteract.readings.time.step import StepClock
from penteract.readings.time.timelines.trace import rank_program
from penteract.schedule.actions import Transfer
from penteract.schedule.registry import schedule_of
from penteract.schedule.schedule_state import source_of
from penteract.step import muon, names
from penteract.step.all_reduces import StepAllReduce
from penteract.step.program import BufferKey, Program
from penteract.step.walk import walk
from penteract.units import Bytes

ACTIVATIONS = "activations"  # what the collectives of the tape carry, with their gradients
SCALES = "largest values"


class Channel(NamedTuple):
    """One kind of call of a rank.

    collective  all_gather, …; of a message, send or recv: its ranks are the sender and the receiver, the rank first
    ranks       the group: of the axis, or of those of its ranks that hold different parts of a matrix
    axis        the axis of the mesh that it goes over; "dp" for buckets and "pp" for messages between stages
    what        what it carries: `ACTIVATIONS`, `SCALES`, or a name of `step/names.py`
    """

    collective: str
    ranks: tuple[int, ...]
    axis: str
    what: str


@dataclass(slots=True)
class Sent:
    """The calls of a channel in a step: how many, their bytes by the price, and the picoseconds that they take."""

    calls: int = 0
    size: Bytes = 0
    picoseconds: int = 0

    def add(self, size: Bytes, picoseconds: int) -> None:
        """One more call."""
        self.calls += 1
        self.size += size
        self.picoseconds += picoseconds


@dataclass(slots=True)
class TrafficReading(Pricing):
    """The price of a step, whose bytes on wires are taken event by event.

    messages  picoseconds of each message between stages, by what it is and its micro-batch
    """

    device: DeviceCosts = field(kw_only=True)
    bucket_costs: BucketCosts = field(kw_only=True)
    messages: Mapping[tuple[tuple[str, int], int], int] = field(kw_only=True)
    found: dict[Channel, Sent] = field(default_factory=dict[Channel, Sent])
    _took: dict[int, int] = field(default_factory=dict[int, int])  # by the identity of a call's site

    def all_reduce(self, reduction: StepAllReduce) -> None:
        Pricing.all_reduce(self, reduction)
        span = GroupSpan.of(self.p.mesh.group(reduction.axis, self.p.rank), self.device.gpus_per_node)
        took = self.device.rates.collective("all_reduce", span, reduction.size)
        self._take(reduction.axis, names.of_all_reduce(reduction), ps(took))

    def call(self, buffer: BufferKey, call: Call) -> None:
        Pricing.call(self, buffer, call)
        if not self.price.wires:
            return
        site, key = call.site, id(call.site)
        if call.phase == "start":
            if key not in self._took:
                self._took[key] = ps(self.device.collective(site))
            self._take(str(site.attrs["axis"]), ACTIVATIONS, self._took[key])
            return
        given = shapes(site, self.load)
        axis = declaration_of(site, self.p.layout).all_reduced_max(call.phase, given, site.weights, site.attrs)[0]
        size = sum(self.price.wires.values())
        self._take(axis, SCALES, ps(self.device.rates.collective("all_reduce", self.device.span(axis), size)))

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        at, placement = self.p.mesh.place(self.p.rank)[0], self.p.layout.placement
        for transfer in transfers:
            Pricing.post_p2p(self, (transfer,))
            t = transfer[0]
            took = self.messages.get(((t.what, source_of(t, at, placement)), t.micro), 0)
            self._take("pp", names.of_transfer(t), took)

    def reduce(self, bucket: int) -> None:
        Pricing.reduce(self, bucket)
        b = self.p.buckets[bucket]
        kind = "reduce_scatter" if b.shards > 1 else "all_reduce"
        self._take("dp", names.of_sum(b), self._of_bucket(kind, bucket))

    def replicate(self, bucket: int) -> None:
        Pricing.replicate(self, bucket)
        if self.p.buckets[bucket].shards > 1:  # else it is the reduction itself, taken there
            self._take("dp", names.REPLICATE, self._of_bucket("all_reduce", bucket))

    def gather(self, bucket: int) -> None:
        Pricing.gather(self, bucket)
        self._take("dp", names.GATHER, self._of_bucket("all_gather", bucket))

    def update(self, bucket: int) -> None:
        Pricing.update(self, bucket)
        b = self.p.buckets[bucket]
        if not b.optimizer_kind.by_matrix:
            return
        wires = muon.wires(b, muon.own(b, self.p.rank), self.p.precision)
        for wire, (_, _, seconds) in zip(wires, self.bucket_costs.matrices(b, self.p.rank)[0], strict=True):
            axis = "tp" if wire.group == b.peers else "dp"
            channel = Channel(wire.kind, wire.group, axis, names.of_matrices(wire.kind))
            self.found.setdefault(channel, Sent()).add(wire.amount, ps(seconds))
        self.price.wires.clear()

    def _of_bucket(self, kind: str, bucket: int) -> int:
        return ps(self.bucket_costs.on_wire(kind, self.p.buckets[bucket])) if self.price.wires else 0

    def _take(self, axis: str, what: str, picoseconds: int) -> None:
        """Take what an event has put on wires. A shift is a send and a receive at the same time: the send has its
        seconds."""
        shift = axis != "pp" and len(self.price.wires) == 2
        for (kind, ranks), size in self.price.wires.items():
            late = shift and kind == "recv"
            self.found.setdefault(Channel(kind, ranks, axis, what), Sent()).add(size, 0 if late else picoseconds)
        self.price.wires.clear()


class RankTraffic(NamedTuple):
    """What a rank sends and receives in a step, and a program of it, of as few micro-batches as show that."""

    found: Mapping[Channel, Sent]
    program: Program


def traffic(steps: StepClock, layout: Layout, rank: int) -> RankTraffic:
    """All that a rank sends and receives in a step; calls of a group of one rank are none.

    The bytes of all channels of a collective and a group add up to `Price.wires`. A long schedule is periodic, so its
    step is extrapolated from two shorter ones, as the number of gathers is (`gather_counts.py`).
    """
    schedule, m = schedule_of(layout.schedule), layout.gradient_accumulation_steps
    enough, period = 2 * schedule.steady_after(layout.pp, layout.vpp), 2 * schedule.period(layout.pp, layout.vpp)
    if m <= enough + 2 * period:
        return _counted(steps, layout, rank)
    first = enough + (m - enough) % period
    few, more = (_counted(steps, layout.put(gradient_accumulation_steps=n), rank) for n in (first, first + period))
    times = (m - first) // period
    return more._replace(found={c: _grown(few.found.get(c, Sent()), sent, times) for c, sent in more.found.items()})


def _grown(few: Sent, more: Sent, times: int) -> Sent:
    return Sent(*(a + (b - a) * times for a, b in ((few.calls, more.calls), (few.size, more.size),
                                                   (few.picoseconds, more.picoseconds))))  # fmt: skip


def _counted(steps: StepClock, lay: Layout, rank: int) -> RankTraffic:
    """The same, counted event by event."""
    p = rank_program(steps, lay, rank)
    line = numbered_schedule(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps)
    took = {link: ps(steps.message_seconds(lay, link[0], link[1], both=link[2])) for link in line.links}
    messages = {(m.where, m.micro): took[m.source, m.target, m.both] for m in line.messages}
    reading = TrafficReading(
        p, steps.composer.load(lay), device=steps.device(lay), bucket_costs=steps.bucket_costs,
        messages=messages,
    )  # fmt: skip
    walk(p, reading)
    return RankTraffic({c: sent for c, sent in reading.found.items() if len(set(c.ranks)) > 1}, p)

"""Seconds of collectives and of sends. Inside a node they are measured. Between nodes they are modelled from the
fabric: latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log, log2
from typing import NamedTuple

from penteract.config.files.hardware_schema import DIRECTLY
from penteract.config.hardware import Curves, Fabric, Points
from penteract.readings.costs.curve import Curve
from penteract.units import Bytes, Seconds

# Of a ring of n ranks: each link carries this many times (n - 1) / n of the tensor. An all-reduce is a reduce-scatter
# and an all-gather.
RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
_HOP = 2e-6  # latency in seconds from one rank to the next of a node, inside a collective; modelled, not measured
_COSTED_AS = {"all_to_all_v": "all_to_all"}  # uneven numbers of rows cost what even ones do


class GroupSpan(NamedTuple):
    """How a group lies in the cluster: its number of ranks, and on how many nodes they are."""

    ranks: int
    nodes: int

    @staticmethod
    def of(ranks: tuple[int, ...], gpus_per_node: int) -> GroupSpan:
        """The span of a group of global ranks. Each node has `gpus_per_node` consecutive ranks."""
        return _span(ranks, gpus_per_node)


@cache
def _span(ranks: tuple[int, ...], gpus_per_node: int) -> GroupSpan:
    return GroupSpan(len(ranks), len({r // gpus_per_node for r in ranks}))


class CollectiveCost(NamedTuple):
    """Seconds of a collective of one group, as a function of bytes: by the curve `inside` within its nodes, and
    `latency + seconds_per_byte · bytes` between them. The two overlap, chunk by chunk, so the slower one counts.
    `inside` is None where a node has one rank of the group."""

    inside: Curve | None
    latency: Seconds
    seconds_per_byte: float

    def __call__(self, amount: Bytes) -> Seconds:
        """Seconds of `amount` bytes: the longer of the part inside nodes and the part between them."""
        between = self.latency + self.seconds_per_byte * amount
        inside = self.inside(amount) if self.inside else 0.0
        return inside if inside > between else between


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The links of a cluster, as costs of collectives and of sends. Curves are seconds by bytes, inside a node.

    measured   (kind of collective, number of ranks) -> curve
    one_way    of a send; `both_ways`: of a send while an equal one comes back, as in a `shift` of a ring
    between    the fabric between nodes
    bus        kind of collective -> (nodes, GB/s): measured bus bandwidth between nodes, as nccl-tests define it
    best       whether curves are replaced by their lower bounds (`Curve.at_best`), for bounds of a search
    costs      (kind, span) -> cost: the cache of `collective`
    """

    measured: Mapping[tuple[str, int], Curve]
    one_way: Curve
    both_ways: Curve
    between: Fabric
    bus: Mapping[str, Points]
    best: bool = False
    costs: dict[tuple[str, GroupSpan], CollectiveCost] = field(
        default_factory=dict[tuple[str, GroupSpan], CollectiveCost], compare=False, repr=False
    )

    @staticmethod
    def of(curves: Curves, inside: Fabric, between: Fabric) -> Interconnect:
        """The measured `curves` of one node, scaled to nodes with the fabric `inside`: all but the latency is
        multiplied by the ratio of the two bandwidths. `between` is the fabric between nodes."""
        slower = curves.inside.gb_per_second / inside.gb_per_second
        one, both = (_curve(points, slower) for points in curves.p2p)
        measured = {(kind, ranks): _curve(points, slower) for kind, ranks, points in curves.collectives}
        return Interconnect(measured, one, both, between, dict(between.bus))

    def collective(self, kind: str, span: GroupSpan, amount: Bytes) -> Seconds:
        """Seconds of a collective, a "send" or a "shift" (a send and a receive at once). `amount`: bytes on one rank:
        of the output of an all-gather, of the input of others."""
        cost = self.costs.get((kind, span))
        if cost is None:
            cost = self._cost(_COSTED_AS.get(kind, kind), span)
            if self.best and cost.inside:
                cost = cost._replace(inside=cost.inside.at_best())
            self.costs[kind, span] = cost
        return cost(amount)

    def _cost(self, kind: str, span: GroupSpan) -> CollectiveCost:
        ranks, nodes = span
        if ranks < 2:
            return CollectiveCost(None, 0.0, 0.0)
        if kind in ("send", "shift"):
            if nodes > 1:
                return CollectiveCost(None, self._latency("send", GroupSpan(2, 2)), 1 / self._port)
            return CollectiveCost(self.one_way if kind == "send" else self.both_ways, 0.0, 0.0)
        if nodes < 2:
            return CollectiveCost(self._inside(kind, ranks), 0.0, 0.0)
        inside = self._inside(kind, ceil(ranks / nodes)) if ranks > nodes else None
        return CollectiveCost(inside, self._latency(kind, span), self._seconds_per_byte(kind, span))

    # ---- inside a node -------------------------------------------------------------------------------------------

    def _inside(self, kind: str, ranks: int) -> Curve:
        """The curve of a group inside a node. Between two measured group sizes it is interpolated. Beyond them it is
        scaled from the nearest size: latency by the number of rounds (log2 of ranks), the rest by a ring's
        (n - 1) / n."""
        if (kind, ranks) in self.measured:
            return self.measured[kind, ranks]
        sizes = sorted(n for k, n in self.measured if k == kind)
        if not sizes:  # a file of before they were measured
            return self._inside(kind.removeprefix(DIRECTLY), ranks)
        below = max((n for n in sizes if n < ranks), default=sizes[0])
        above = min((n for n in sizes if n > ranks), default=below)
        low = self.measured[kind, below]
        if above != below and below < ranks:
            high, weight = self.measured[kind, above], (ranks - below) / (above - below)
            return Curve.of((s, low(s) * (1 - weight) + high(s) * weight) for s in low.sizes)
        traffic = (ranks - 1) / ranks / ((below - 1) / below)  # bytes on a link of the ring, relative to `below` ranks
        # Ranks that read directly take one copy after the other.
        direct = kind.startswith(DIRECTLY)
        latency, rounds = low.floor, (ranks - 1) / (below - 1) if direct else log2(ranks) / log2(below)
        return Curve.of((s, latency * rounds + (low(s) - latency) * traffic) for s in low.sizes)

    # ---- between nodes -------------------------------------------------------------------------------------------

    @property
    def _port(self) -> float:
        """Bytes/s that one GPU's network port reaches in one direction."""
        return self.between.gb_per_second * 1e9 * self.between.efficiency

    def _seconds_per_byte(self, kind: str, span: GroupSpan) -> float:
        """Seconds per byte between nodes. A group has the network ports of its own GPUs alone, because other groups use
        the others at the same time.

        Where the bus bandwidth of whole nodes was measured, the rate is that of the measured time less the latency.
        """
        local, n = span.ranks / span.nodes, span.ranks
        if kind == "all_to_all":
            return (n - local) / n / self._port
        port = RING_PASSES[kind] * (n - 1) / n / (self._port * local)
        points, fabric = self.bus.get(kind), self.between
        if points is None:
            return port
        whole = GroupSpan(span.nodes * fabric.devices, span.nodes)
        per_byte = RING_PASSES[kind] * (whole.ranks - 1) / whole.ranks  # bus bytes by bytes of the tensor
        took = fabric.message * per_byte / (_interpolated(points, span.nodes) * 1e9) - self._latency(kind, whole)
        traffic = (n - 1) / n / ((whole.ranks - 1) / whole.ranks)
        return took / fabric.message * traffic * fabric.devices / local if took > 0 else port

    def _latency(self, kind: str, span: GroupSpan) -> Seconds:
        """Seconds of the call, and of a ring's hops inside and between nodes. An all-reduce uses a tree where that is
        faster, as NCCL does."""
        hop, call = self.between.latency_us * 1e-6, self.one_way.floor
        ring = span.nodes * hop + (span.ranks - span.nodes) * _HOP
        tree = 2 * ceil(log2(span.nodes)) * hop + 2 * span.ranks / span.nodes * _HOP
        return call + (min(ring, tree) if kind == "all_reduce" else ring)


def _curve(points: Points, slower: float) -> Curve:
    """A curve from (bytes, µs); all but the latency takes `slower` times as long."""
    return Curve.of((size, us * 1e-6) for size, us in points).stretched(slower)


def _interpolated(points: Points, x: float) -> float:
    """The value at `x`, linear between points on logarithmic axes, and on along the first or last segment beyond
    them."""
    i = min(max(sum(p[0] < x for p in points), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 * (y1 / y0) ** (log(x / x0) / log(x1 / x0))

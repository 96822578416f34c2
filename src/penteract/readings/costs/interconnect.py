"""Seconds of collectives and of sends: inside a node as measured; between nodes latency + bytes / bandwidth, modelled
from the fabric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log, log2
from typing import NamedTuple

from penteract.config.hardware import Curves, Fabric, Points
from penteract.readings.costs.curve import Curve
from penteract.units import Bytes, Seconds

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # how often the whole tensor passes a link of a ring
_HOP = 2e-6  # seconds from rank to rank of one node inside a collective; modelled
_PRICED_AS = {"all_to_all_v": "all_to_all"}  # as if all ranks sent the same number of rows


class GroupSpan(NamedTuple):
    """A group of `ranks` ranks over `nodes` nodes."""

    ranks: int
    nodes: int

    @staticmethod
    def of(ranks: tuple[int, ...], gpus_per_node: int) -> GroupSpan:
        """The span of global ranks; a node has `gpus_per_node` consecutive ones."""
        return _span(ranks, gpus_per_node)


@cache
def _span(ranks: tuple[int, ...], gpus_per_node: int) -> GroupSpan:
    return GroupSpan(len(ranks), len({r // gpus_per_node for r in ranks}))


class CollectiveCost(NamedTuple):
    """Seconds of a collective of one group: `inside` the nodes, and `latency + seconds_per_byte · bytes` between them.
    Both parts are pipelined over the tensor, so the slower one counts."""

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
    """What joins the GPUs of a cluster, as costs of collectives and of sends.

    measured   (kind, ranks) -> curve, inside a node
    one_way    a send inside a node; `both_ways`: with an equal one coming back
    between    the fabric between nodes; `bus`: its measured bus bandwidth, by kind
    best       whether curves are replaced by their lower bounds (`Curve.at_best`)
    costs      the cache of `collective`
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
        """The measured `curves`, scaled to the fabric `inside`: the part above the latency is stretched by the ratio of
        their links."""
        slower = curves.inside.gb_per_second / inside.gb_per_second
        one, both = (_curve(points, slower) for points in curves.p2p)
        measured = {(kind, ranks): _curve(points, slower) for kind, ranks, points in curves.collectives}
        return Interconnect(measured, one, both, between, dict(between.bus))

    def collective(self, kind: str, span: GroupSpan, amount: Bytes) -> Seconds:
        """Seconds of a collective. `amount`: bytes of the output of a gather, of the input of others."""
        cost = self.costs.get((kind, span))
        if cost is None:
            cost = self._cost(_PRICED_AS.get(kind, kind), span)
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
        """The curve of a group inside a node. Between two measured group sizes it is interpolated; beyond them it
        follows a ring: the latency of more rounds, and the bandwidth of the nearest size."""
        if (kind, ranks) in self.measured:
            return self.measured[kind, ranks]
        sizes = sorted(n for k, n in self.measured if k == kind)
        below = max((n for n in sizes if n < ranks), default=sizes[0])
        above = min((n for n in sizes if n > ranks), default=below)
        low = self.measured[kind, below]
        if above != below and below < ranks:
            high, weight = self.measured[kind, above], (ranks - below) / (above - below)
            return Curve.of((s, low(s) * (1 - weight) + high(s) * weight) for s in low.sizes)
        share = (ranks - 1) / ranks / ((below - 1) / below)
        floor, rounds = low.floor, log2(ranks) / log2(below)
        return Curve.of((s, floor * rounds + (low(s) - floor) * share) for s in low.sizes)

    # ---- between nodes -------------------------------------------------------------------------------------------

    @property
    def _port(self) -> float:
        """Bytes/s of one device's port."""
        return self.between.gb_per_second * 1e9 * self.between.efficiency

    def _seconds_per_byte(self, kind: str, span: GroupSpan) -> float:
        """Between nodes. A group uses the ports of its own devices, as neighbouring groups use the others.

        Where the bus bandwidth of whole nodes was measured, the time beyond the latency of rounds gives the rate.
        """
        local, n = span.ranks / span.nodes, span.ranks
        if kind == "all_to_all":
            return (n - local) / n / self._port
        port = _PASSES[kind] * (n - 1) / n / (self._port * local)
        points, fabric = self.bus.get(kind), self.between
        if points is None:
            return port
        whole = GroupSpan(span.nodes * fabric.devices, span.nodes)
        passed = _PASSES[kind] * (whole.ranks - 1) / whole.ranks
        took = fabric.message * passed / (_interpolated(points, span.nodes) * 1e9) - self._latency(kind, whole)
        share = (n - 1) / n / ((whole.ranks - 1) / whole.ranks)
        return took / fabric.message * share * fabric.devices / local if took > 0 else port

    def _latency(self, kind: str, span: GroupSpan) -> Seconds:
        """Latency of the call and of a ring's hops inside and between nodes. An all-reduce takes a tree if that is
        faster."""
        hop, call = self.between.latency_us * 1e-6, self.one_way.floor
        ring = span.nodes * hop + (span.ranks - span.nodes) * _HOP
        tree = 2 * ceil(log2(span.nodes)) * hop + 2 * span.ranks / span.nodes * _HOP
        return call + (min(ring, tree) if kind == "all_reduce" else ring)


def _curve(points: Points, slower: float) -> Curve:
    """A curve from points in microseconds."""
    return Curve.of((size, us * 1e-6) for size, us in points).stretched(slower)


def _interpolated(points: Points, x: float) -> float:
    """Linear between points in log-log; extrapolated beyond them along the outermost segments."""
    i = min(max(sum(p[0] < x for p in points), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 * (y1 / y0) ** (log(x / x0) / log(x1 / x0))

"""What a rank's gradients cost once a step: their sums on the wire, the optimizer, and parameters made whole again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from penteract.estimate.pieces import Kind
from penteract.estimate.price import away
from penteract.estimate.rates import Rates, Span
from penteract.ops.bodies.body import Product
from penteract.ops.collectives import counted
from penteract.ops.offload import COPIES
from penteract.ops.params import Param
from penteract.ops.spec import Spec, Widths
from penteract.parallel.data import NONE, Alike, Bucket, Pack, bucket_of
from penteract.parallel.matrix import Matrix, deal
from penteract.spec.mesh import Mesh
from penteract.spec.precision import Policy
from penteract.step import muon
from penteract.step.update import SLICE, kept, touched
from penteract.units import Seconds

Times = Callable[[Kind], Mapping[str, Seconds]]  # a piece -> seconds of each of its actions


@dataclass(frozen=True, slots=True)
class Turn:
    """One bucket: seconds of its sum, of its update, and of gathering it again."""

    reduce: Seconds
    update: Seconds
    gather: Seconds
    wait: Seconds = 0.0  # of the update, for the link to the host


@dataclass(frozen=True, slots=True)
class Reduction:
    """All buckets of a rank."""

    reduce: Seconds  # of all of them, one after the other
    update: Seconds
    wait: Seconds = 0.0  # of the update, for the link to the host


@dataclass(frozen=True, slots=True)
class Turns:
    """The buckets of a rank in their order."""

    turns: tuple[Turn, ...]

    def after_update(self, used: Sequence[Seconds], beside: float) -> Seconds:
        """Seconds by which gathers delay the next step: each starts when its bucket has been moved, the last bucket
        first, and must end before its first use; those that do make the forward above them `beside` times slower.

        `used`: when the first use is, from the start of the next forward.
        """
        now, wire, ends = 0.0, 0.0, list[Seconds]()
        for turn in reversed(self.turns):
            now += turn.update
            if turn.gather:
                wire = max(wire, now) + turn.gather
            ends.append(wire if turn.gather else 0.0)
        late = max(0.0, *(end - now - at for end, at in zip(reversed(ends), used, strict=True)))
        return late + max(0.0, wire - now - late) * (beside - 1)

    def after_backward(self, ready: Sequence[Seconds], end: Seconds) -> Seconds:
        """Seconds by which the last sum ends after the last backward's `end`; `ready`: when each bucket may go."""
        wire = 0.0
        for turn, at in zip(self.turns, ready, strict=True):
            if turn.reduce:
                wire = max(wire, at) + turn.reduce
        return max(0.0, wire - end)


class Tail(NamedTuple):
    """Seconds after a rank's last backward: of sums that it did not hide, of the update with its gathers and the sum of
    the gradient's norm, of those gathers alone, and of its waits for the link to the host alone."""

    data: Seconds
    update: Seconds
    gathers: Seconds
    wait: Seconds = 0.0


def ready(
    placed: Sequence[tuple[Kind, tuple[Param, ...]]], times: Times, packs: Iterable[Pack]
) -> tuple[list[Seconds], Seconds]:
    """When each pack's last gradient is written, from the start of the last backward, and when that ends."""
    now, at = 0.0, dict[int, list[Seconds]]()  # by identity: equal layers share their parameters
    for kind, params in reversed(placed):
        now += fsum(t for action, t in times(kind).items() if action != "Fwd")
        for p in params:
            at.setdefault(id(p), []).append(now)
    turn = {p: iter(moments) for p, moments in at.items()}  # packs take them in this order
    return [max([next(turn[id(p)]) for p in pack.params]) for pack in packs], now


def used(placed: Sequence[tuple[Kind, tuple[Param, ...]]], times: Times, packs: Iterable[Pack]) -> list[Seconds]:
    """When each pack is first read, from the start of the first forward."""
    now, at = 0.0, dict[int, list[Seconds]]()
    for kind, params in placed:
        for p in params:
            at.setdefault(id(p), []).append(now)
        now += times(kind)["Fwd"]
    turn = {p: reversed(moments) for p, moments in at.items()}  # packs take them in the order of backward
    return [min([next(turn[id(p)]) for p in pack.params]) for pack in packs]


def reduction(counted: Iterable[tuple[Bucket, int]], rates: Rates, p: Policy, gpus_per_node: int) -> Reduction:
    """Price the buckets of a rank; of equal ones there is one, and how many."""
    slice_ = 0
    reduce = update = wait = 0.0
    for b, n in counted:
        turn = turn_of(b, rates, p, gpus_per_node)
        slice_ = max(slice_, kept(min(b.shard_size, SLICE), p.keeping(b.moments)) if away(b, p) else 0)
        reduce, update, wait = reduce + n * turn.reduce, update + n * turn.update, wait + n * turn.wait
    ends = fsum(rates.copy(word, slice_) for word in COPIES)  # the first slice comes, and the last leaves, alone
    return Reduction(reduce, update + ends, wait + ends)


def turns(packs: Iterable[Pack], mesh: Mesh, rank: int, rates: Rates, p: Policy, *, gpus_per_node: int) -> Turns:
    """Price the buckets of a rank one by one: of those that are alike, the first."""
    known: dict[tuple[Alike, int, bool, tuple[object, ...]], Turn] = {}
    out: list[Turn] = []
    for pack in packs:
        key = (pack.alike, pack.elements, pack.unit == NONE, pack.shapes)
        if key not in known:
            known[key] = turn_of(bucket_of(pack, mesh, rank), rates, p, gpus_per_node)
        out.append(known[key])
    return Turns(tuple(out))


def turn_of(b: Bucket, rates: Rates, p: Policy, gpus_per_node: int) -> Turn:
    """What a bucket takes once a step; what is cut goes over wires beside the passes too (`lane.py`)."""
    add = gather = 0.0
    if b.shards > 1:
        if not b.cut_gradients:
            add = on_wire("reduce_scatter", b, rates, p.widths, gpus_per_node)
        if not b.cut_parameters:
            gather = on_wire("all_gather", b, rates, p.widths, gpus_per_node)
    if len(b.replicas) > 1:
        add += on_wire("all_reduce", b, rates, p.widths, gpus_per_node)
    update, there = moving(b, rates, p, gpus_per_node), away(b, p)
    wait = max(0.0, *(rates.copy(word, there) - update for word in COPIES)) if there else 0.0  # both ways at once
    return Turn(add, update + wait, gather, wait)


def moving(b: Bucket, rates: Rates, p: Policy, gpus_per_node: int) -> Seconds:
    """Of a bucket's update; where matrices are dealt, all wait for the rank whose own take longest."""
    if not b.mover.by_matrix:
        return rates.update(touched(b.shard_size, p.keeping(b.moments)))

    def seconds(hand: tuple[Matrix, ...]) -> Seconds:
        sent = (rates.collective(w.kind, Span.of(w.group, gpus_per_node), w.amount) for w in muon.wires(b, hand, p))
        made = Counter(product for m in hand for product in muon.products(m))
        steps = b.mover.steps
        return fsum((*sent, *(steps * n * rates.product(Product(1, *one)) for one, n in made.items())))

    return rates.update(muon.touched(b, p)) + max(seconds(hand) for hand in deal(b.matrices, len(b.team)))


def on_wire(kind: str, b: Bucket, rates: Rates, widths: Widths, gpus_per_node: int) -> Seconds:
    """One collective on a bucket: over those who share it, or over the replicas of a shard."""
    role = b.gathered_as if kind == "all_gather" else "reduce"
    whole, shard = Spec((b.size,), role), Spec((b.shard_size,), role)
    ends = {"all_gather": (shard, whole), "reduce_scatter": (whole, shard), "all_reduce": (shard, shard)}[kind]
    wire, group = counted(kind, *ends), b.replicas if kind == "all_reduce" else b.sharers
    return rates.collective(kind, Span.of(group, gpus_per_node), wire.numel() * widths[wire.role])

"""What a rank's gradients cost once a step: their sums on the wire, the optimizer, and parameters made whole again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penteract.estimate.price import bucket_workspace, held
from penteract.estimate.rates import Rates, Span
from penteract.ops.collectives import counted
from penteract.ops.spec import Spec, Widths
from penteract.parallel.data import Alike, Bucket, Pack, bucket_of
from penteract.spec.mesh import Mesh
from penteract.spec.precision import Policy
from penteract.step.update import touched
from penteract.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """One bucket: seconds of its sum, of its update, and of gathering it again."""

    reduce: Seconds
    update: Seconds
    gather: Seconds


@dataclass(frozen=True, slots=True)
class Reduction:
    """All buckets of a rank. `held`: bytes that it keeps of them between steps, by kind."""

    held: Mapping[str, Bytes]
    largest: Bytes  # what the update allocates
    reduce: Seconds  # of all of them, one after the other
    update: Seconds


@dataclass(frozen=True, slots=True)
class Turns:
    """The buckets of a rank in their order."""

    turns: tuple[Turn, ...]

    def after_update(self) -> Seconds:
        """Seconds by which the last gather ends after the last update: each starts when its bucket has been moved."""
        now = wire = 0.0
        for turn in self.turns:
            now += turn.update
            if turn.gather:
                wire = max(wire, now) + turn.gather
        return max(0.0, wire - now)

    def after_backward(self, ready: Sequence[Seconds], end: Seconds) -> Seconds:
        """Seconds by which the last sum ends after the last backward's `end`; `ready`: when each bucket may go."""
        wire = 0.0
        for turn, at in zip(self.turns, ready, strict=True):
            if turn.reduce:
                wire = max(wire, at) + turn.reduce
        return max(0.0, wire - end)


class Tail(NamedTuple):
    """Seconds after a rank's last backward: of sums that it did not hide, of the update with its gathers and the sum of
    the gradient's norm, and of those gathers alone."""

    data: Seconds
    update: Seconds
    gathers: Seconds


def reduction(counted: Iterable[tuple[Bucket, int]], rates: Rates, p: Policy, gpus_per_node: int) -> Reduction:
    """Price the buckets of a rank; of equal ones there is one, and how many."""
    kept, largest, reduce, update = Counter[str](), 0, 0.0, 0.0
    for b, n in counted:
        turn = turn_of(b, rates, p, Span.of(b.holders, gpus_per_node))
        for kind, size in held((b,), p).items():
            kept[kind] += n * size
        largest = max(largest, bucket_workspace(b, p))
        reduce, update = reduce + n * turn.reduce, update + n * turn.update
    return Reduction(kept, largest, reduce, update)


def turns(packs: Iterable[Pack], mesh: Mesh, rank: int, rates: Rates, p: Policy, *, gpus_per_node: int) -> Turns:
    """Price the buckets of a rank one by one: of those that are alike, the first."""
    known: dict[tuple[Alike, int], Turn] = {}
    out: list[Turn] = []
    for pack in packs:
        key = (pack.alike, pack.elements)
        if key not in known:
            b = bucket_of(pack, mesh, rank, p.grain)
            known[key] = turn_of(b, rates, p, Span.of(b.holders, gpus_per_node))
        out.append(known[key])
    return Turns(tuple(out))


def turn_of(b: Bucket, rates: Rates, p: Policy, span: Span) -> Turn:
    widths = p.widths
    whole, shard = Spec((b.size,), "reduce"), Spec((b.shard_size,), "reduce")
    add = gather = 0.0
    if b.shards > 1:
        add = _seconds("reduce_scatter", whole, shard, rates, widths, span)
        own, all_of_it = Spec((b.shard_size,), "parameter"), Spec((b.size,), "parameter")
        gather = _seconds("all_gather", own, all_of_it, rates, widths, span)
    elif len(b.holders) > 1:
        add = _seconds("all_reduce", whole, whole, rates, widths, span)
    return Turn(add, rates.update(touched(b.shard_size, p)), gather)


def _seconds(kind: str, x: Spec, y: Spec, rates: Rates, widths: Widths, span: Span) -> Seconds:
    wire = counted(kind, x, y)
    return rates.collective(kind, span, wire.numel() * widths[wire.role])

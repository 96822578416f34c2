"""What a rank's gradients cost once a step: their sums on the wire, the optimizer, and parameters made whole again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from penteract.estimate.price import held
from penteract.estimate.rates import Rates, Span
from penteract.ops.collectives import counted
from penteract.ops.spec import Spec, Widths
from penteract.parallel.data import Bucket
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
    turns: tuple[Turn, ...]
    reduce: Seconds  # of all of them, one after the other
    update: Seconds

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


def reduction(buckets: Iterable[Bucket], rates: Rates, widths: Widths, gpus_per_node: int) -> Reduction:
    """Price the buckets of a rank."""
    made, spans = tuple(buckets), dict[tuple[int, ...], Span]()
    turns: list[Turn] = []
    known = dict[tuple[int, int, tuple[int, ...]], Turn]()
    for b in made:
        if b.holders not in spans:
            spans[b.holders] = Span.of(b.holders, gpus_per_node)
        key = (b.size, b.shards, b.holders)
        if key not in known:
            known[key] = _turn(b, rates, widths, spans[b.holders])
        turns.append(known[key])
    return Reduction(
        held=held(made, widths), largest=max(b.shard_size for b in made) * widths["stat"], turns=tuple(turns),
        reduce=fsum(t.reduce for t in turns), update=fsum(t.update for t in turns),
    )  # fmt: skip


def _turn(b: Bucket, rates: Rates, widths: Widths, span: Span) -> Turn:
    whole, shard = Spec((b.size,), "stat"), Spec((b.shard_size,), "stat")
    add = gather = 0.0
    if b.shards > 1:
        add = _seconds("reduce_scatter", whole, shard, rates, widths, span)
        gather = _seconds("all_gather", Spec((b.shard_size,)), Spec((b.size,)), rates, widths, span)
    elif len(b.holders) > 1:
        add = _seconds("all_reduce", whole, whole, rates, widths, span)
    # Read: gradient (twice, for its norm too), master, two moments. Written: the last three, and the parameter.
    touched = b.shard_size * (8 * widths["stat"] + (widths["compute"] if widths["compute"] < widths["stat"] else 0))
    return Turn(add, rates.update(touched), gather)


def _seconds(kind: str, x: Spec, y: Spec, rates: Rates, widths: Widths, span: Span) -> Seconds:
    wire = counted(kind, x, y)
    return rates.collective(kind, span, wire.numel() * widths[wire.role])

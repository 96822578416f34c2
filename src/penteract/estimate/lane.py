"""What ZeRO 2 and 3 put on the wires beside a pass: gathers of the units that come next, sums of those that were last.

While a unit computes, the lane of its data ranks carries what `step/events.py` puts there: the next unit's gather, and
the reduce-scatter of the gradients that the last one wrote. The unit takes as long as the slower of both. A pass is
taken for one of many, so that its ends lie beside passes like it; but nothing lies beside the first unit's gather at
the start of a step, and the last unit's sum at its end. What is gathered as codes of FP8 is made such first, while
nothing else computes; their scales are agreed on when a step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import fsum
from typing import NamedTuple

from penteract.estimate.composed import Composer
from penteract.estimate.packed import Units, first_rank
from penteract.estimate.pieces import Kind
from penteract.estimate.pipeline import Passes
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reduction import Times, on_wire
from penteract.ops.bodies.fp8 import LONE
from penteract.ops.spec import Widths
from penteract.parallel.data import Bucket
from penteract.schedule.in_flight import action_lists, steady
from penteract.spec.layout import Layout, Schedule
from penteract.spec.mesh import Mesh
from penteract.step.ring import Reads, gathers, places
from penteract.units import Seconds

_GATHERED = ("Fwd", "Bwd", "Inp")


@dataclass(slots=True)
class UnitLane:
    """One unit of a rank: seconds of its gather, of its sums by the action that writes them, and of making its shard
    codes before it is gathered."""

    kind: Kind
    cut: frozenset[str]  # parameters
    gather: Seconds
    sums: Mapping[str, Seconds]
    coding: Seconds = 0.0


class Passing(NamedTuple):
    """A pass of one chunk, by action: its seconds, and those of them by which its lane is slower than its work."""

    seconds: Mapping[str, Seconds]
    exposed: Mapping[str, Seconds]


class Laned(NamedTuple):
    """A rank's passes; seconds of all of a micro-batch's by which lanes make them slower; and those at the ends of a
    step, where there is nothing to hide them."""

    passes: Passes
    exposed: Seconds
    ends: Seconds


def unit_lanes(
    units: Sequence[Units],
    buckets: Sequence[Sequence[Bucket]],
    seconds: Callable[[str, Bucket], Seconds],
    *,
    split: bool,
) -> list[UnitLane]:
    """Of each unit of a rank; of equal ones it is one object. `buckets`: of a unit of each run. `seconds`: of
    a collective on a bucket, or of making its shard "code"; `split`: input and weight gradients apart."""
    found = dict[Kind, UnitLane]()
    for run, own in zip(units, buckets, strict=True):
        if run.kind in found:
            continue
        lane = found[run.kind] = UnitLane(run.kind, frozenset(), 0.0, {})
        for b in own:
            if b.cut_parameters:
                lane.cut |= {q.name for q in b.params}
                lane.gather += seconds("all_gather", b)
                lane.coding += seconds("code", b) if b.gathered_as == "code" else 0.0
            if b.cut_gradients:
                action = ("Wgt" if b.late else "Inp") if split else "Bwd"
                lane.sums = {**lane.sums, action: lane.sums.get(action, 0.0) + seconds("reduce_scatter", b)}
    return [found[run.kind] for run in units for _ in range(run.number)]


def unit_reads(
    chunks: Sequence[Sequence[UnitLane]], read: Callable[[Kind], Mapping[str, frozenset[str]]]
) -> tuple[Reads, ...]:
    """Which units the actions of each chunk read. `read`: parameters that an action reads, of a kind of piece."""
    out, number, known = list[Reads](), 0, dict[int, list[str]]()
    for own in chunks:
        by_action = dict[str, list[int]]()
        for i, lane in enumerate(own, number):
            if id(lane) not in known:
                known[id(lane)] = [action for action, names in read(lane.kind).items() if names & lane.cut]
            for action in known[id(lane)]:
                by_action.setdefault(action, []).append(i)
        out.append({a: tuple(some if a == "Fwd" else reversed(some)) for a, some in by_action.items()})
        number += len(own)
    return tuple(out)


def gather_shares(layout: Layout, rank: int, reads: Sequence[Reads], units: int) -> dict[int, float]:
    """Of each unit, how many of its readings ask for a gather; `rank`: of the pipeline."""
    lay, n = layout, places(layout, units)
    asked = tuple(tuple(sorted(r.items())) for r in reads)
    found = _counts(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, (rank, n, asked))
    uses = dict[int, int]()
    for r in reads:
        for some in r.values():
            for unit in some:
                uses[unit] = uses.get(unit, 0) + lay.gradient_accumulation_steps
    return {unit: found.get(unit, 0) / count for unit, count in uses.items()}


_Asked = tuple[int, int, tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]]  # rank, places, reads of its chunks


@cache
def _counts(schedule: Schedule, pp: int, vpp: int, micros: int, asked: _Asked) -> Mapping[int, int]:
    """Gathers of a step. A long schedule repeats itself, so it is foretold from two shorter ones."""
    enough, turn = 2 * steady(pp, vpp), 2 * (pp if vpp > 1 else 1)
    if micros <= enough + 2 * turn:
        return count_gathers(schedule, pp, vpp, micros, asked)
    first = enough + (micros - enough) % turn
    few, more = (count_gathers(schedule, pp, vpp, m, asked) for m in (first, first + turn))
    return {u: few[u] + (n - few[u]) * (micros - first) // turn for u, n in more.items()}


def count_gathers(schedule: Schedule, pp: int, vpp: int, micros: int, asked: _Asked) -> Mapping[int, int]:
    """Gathers of a step, of each unit, counted through."""
    rank, n, reads = asked
    return gathers(action_lists(schedule, pp, vpp, micros)[rank], [dict(r) for r in reads], n)


def passing(units: Sequence[UnitLane], times: Times, shares: Sequence[float], beside: float) -> Passing:
    """A pass through a chunk's `units`. `shares`: of each unit's readings, those with a gather; `beside`: how much
    slower a computation is while its lane is busy."""
    seconds, exposed, slower = dict[str, Seconds](), dict[str, Seconds](), beside - 1
    each = {unit.kind: times(unit.kind) for unit in units}
    ahead = [(share * unit.gather, share * unit.coding) for unit, share in zip(units, shares, strict=False)]
    for action in each[units[0].kind]:
        order = slice(None, None, 1 if action == "Fwd" else -1)
        work = [each[unit.kind][action] for unit in units[order]]
        sums = [unit.sums.get(action, 0.0) for unit in units[order]]
        next_ = ahead[order] if action in _GATHERED else [(0.0, 0.0)] * len(units)
        total = 0.0
        for own, (fetch, coding), before in zip(work, (*next_[1:], next_[0]), (sums[-1], *sums[:-1]), strict=True):
            wire = fetch + before
            total += coding + max(own + min(own, wire) * slower, wire)
        seconds[action] = total
        exposed[action] = total - fsum(work)
    return Passing(seconds, exposed)


def coding(b: Bucket, rates: Rates, widths: Widths) -> Seconds:
    """Of making a shard codes: it is read, and they are written."""
    return rates.moved(b.shard_size * (widths["parameter"] + widths["code"]))


def agreeing(coded: Sequence[Bucket], stage: Span, rates: Rates, widths: Widths) -> Seconds:
    """Of the scales of a step: shards are read for their largest values, on which the ranks of the stage agree."""
    read = fsum(rates.moved(b.shard_size * widths["parameter"]) for b in coded)
    return read + rates.collective("all_reduce", stage, LONE * sum(len(b.params) for b in coded))


def beside_lane(composer: Composer, layout: Layout, rank: int, times: Times, rates: Rates, gpus_per_node: int) -> Laned:
    """The passes of a pipeline rank, with what its lane does beside them."""
    lay, widths, known = layout, composer.widths, dict[tuple[object, ...], Seconds]()

    def seconds(kind: str, b: Bucket) -> Seconds:
        key = (kind, b.size, b.sharers[0], b.sharers[-1], b.shards, b.gathered_as)
        if key not in known:
            code = kind == "code"
            known[key] = coding(b, rates, widths) if code else on_wire(kind, b, rates, widths, gpus_per_node)
        return known[key]

    mesh = Mesh(lay)
    runs = composer.packer.runs(lay, rank)
    buckets = composer.packer.unit_buckets(lay, runs, rank)
    lanes = unit_lanes(runs.units, buckets, seconds, split=lay.split_backward)
    ends = list(accumulate((sum(n for _, n in chain) for chain in composer.chains_of(lay, rank)), initial=0))
    chunks = [lanes[a:b] for a, b in pairwise(ends)]
    read = {kind: composer.piece(lay, kind).read_by for kind in dict.fromkeys(run.kind for run in runs.units)}
    reads = unit_reads(chunks, read.__getitem__)
    share = gather_shares(lay, rank, reads, len(lanes))
    shares = [share.get(i, 0.0) for i in range(len(lanes))]
    out = [passing(own, times, shares[a:], rates.beside) for own, a in zip(chunks, ends, strict=False)]
    first = lanes[0]
    ends = first.gather + first.coding + first.sums.get("Wgt" if lay.split_backward else "Bwd", 0.0)
    every = zip(runs.units, buckets, strict=True)
    if coded := [b for run, own in every for b in own * run.number if b.gathered_as == "code"]:
        stage = Span.of(mesh.group("stage", first_rank(mesh, rank)), gpus_per_node)
        ends += agreeing(coded, stage, rates, widths)
    return Laned(tuple(p.seconds for p in out), fsum(fsum(p.exposed.values()) for p in out), ends)

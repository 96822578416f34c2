"""Bucket events of a step (gathers, reductions, waits): the rule of `fsdp.py`, applied to one action after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.errors import Bug
from penteract.ops.declarations.registry import is_attention_backward
from penteract.ops.lower import Instruction
from penteract.parallel.data import Bucket
from penteract.step.fsdp import Due, Event, FsdpRule, Touch, upcoming
from penteract.step.ring_buffer import count_units, depth

READS = ("forward", "input_gradient")  # phases that read parameters
At = tuple[int, int]  # an action, and the position of an instruction in it


class Around(NamedTuple):
    """Events before and after an instruction."""

    before: tuple[Event, ...] = ()
    after: tuple[Event, ...] = ()


Events = Mapping[At, Around]


def events(
    buckets: Sequence[Bucket], layout: Layout, instructions: Iterable[tuple[At, Instruction]], end: At
) -> Events:
    """All bucket events of a step. `end`: the position after the last action."""
    rule = FsdpRule(buckets, depth(layout, count_units(buckets)))
    every = list(instructions)
    actions = _by_action(touches(buckets, every))
    attention = defaultdict[int, list[At]](list)
    for at, instruction in every:
        if is_attention_backward(instruction.call.site.op_name, instruction.call.phase):
            attention[at[0]].append(at)
    needs, last = first_reads(buckets, actions), last_writes(actions)
    shared = sorted(b for b in last if buckets[b].across_pp_ranks)
    sums = {b: at for b, at in last.items() if not buckets[b].cut_gradients and not buckets[b].across_pp_ranks}
    found = [rule.unit_reads(touched, attention[a]) for a, touched in actions.items()]
    next_reads = upcoming([[unit for _, unit in passing.reads] for passing in found])
    before, after = defaultdict[At, list[Event]](list), defaultdict[At, list[Event]](list)
    left = rule.begin()
    for (a, touched), passing, unit in zip(actions.items(), found, next_reads, strict=True):
        due = Due([(at, b) for b, at in needs.items() if at[0] == a], [(at, b) for b, at in sums.items() if at[0] == a])
        here, there, left = rule.action(left, passing, due, unit, lambda b, a=a: last[b][0] == a)
        before |= here
        after |= there
        _check_whole(buckets, a, touched)
    before[end].extend(rule.end(left, shared, last.__getitem__))
    return {at: Around(tuple(before.get(at, ())), tuple(after.get(at, ()))) for at in {**before, **after}}


def touches(buckets: Sequence[Bucket], instructions: Iterable[tuple[At, Instruction]]) -> Iterator[Touch]:
    """Every instruction with parameters, in walk order."""
    bucket_of = {q.name: b for b, bucket in enumerate(buckets) for q in bucket.params}
    for at, instruction in instructions:
        site = instruction.call.site
        if site.params:
            own = tuple(dict.fromkeys(bucket_of[n] for n in site.params))
            yield Touch(at, own, instruction.call.phase == "weight_gradient", site.params)


def _by_action(touched: Iterator[Touch]) -> Mapping[int, list[Touch]]:
    found: dict[int, list[Touch]] = {}
    for t in touched:
        found.setdefault(t.at[0], []).append(t)
    return found


def first_reads(buckets: Sequence[Bucket], actions: Mapping[int, list[Touch]]) -> dict[int, At]:
    """The first read of each bucket that is gathered after the update."""
    found: dict[int, At] = {}
    for touched in actions.values():
        for t in touched:
            for b in t.buckets if not t.writes else ():
                if buckets[b].gathered_after_update:
                    found.setdefault(b, t.at)
    return found


def last_writes(actions: Mapping[int, list[Touch]]) -> dict[int, At]:
    """The last write of each bucket's gradients."""
    return {b: t.at for touched in actions.values() for t in touched if t.writes for b in t.buckets}


def _check_whole(buckets: Sequence[Bucket], action: int, touched: Sequence[Touch]) -> None:
    """Check that one action writes all gradients of a bucket whose gradients are sharded."""
    written = defaultdict[int, set[str]](set)
    for t in touched:
        for b in t.buckets if t.writes else ():
            if buckets[b].cut_gradients:
                written[b] |= {*t.names}
    for b, names in written.items():
        if missing := {q.name for q in buckets[b].params} - names:
            raise Bug("BUCKET", f"action {action} writes only part of a bucket, without {sorted(missing)[0]}")

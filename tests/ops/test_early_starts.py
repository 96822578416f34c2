"""Collectives of experts begin when their input is there and are waited for when their result is read: the calls are
the same, in an order that gives each what it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from layouts import Case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.ops import lower
from penteract.ops.declarations import OPS
from penteract.ops.overlap.early_starts import overlap
from penteract.ops.spec import Spec
from penteract.ops.tape import Call, Site

MODEL = ModelSpec(
    layers=2, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=64, vocab_size=64, initial_std=0.3,
    moe=MoESpec(experts=8, top_k=2, ffn_size=16, shared_ffn_size=24),
)  # fmt: skip
EP = {"axis": "ep", "overlaps": True}
LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, recompute=("*",), zero=3),
    Layout(dp=2, tp=2, ep=2, recompute=("ep_all_gather", "permute"), collectives="overlapped"),
    Layout(dp=2, tp=2, ep=2, expert_tp=2),
    Layout(dp=2, ep=2, pp=2, schedule="zb_h1", gradient_accumulation_steps=2),
]


def lists(layout: Layout) -> list[tuple[list[Call], list[Call]]]:
    """What each list of calls of a layout's program was, and what it is."""
    seen = list[tuple[list[Call], list[Call]]]()

    def watched(calls: Sequence[Call]) -> list[Call]:
        seen.append((list(calls), made := overlap(calls)))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "overlap", watched)
        Case(MODEL, replace(layout, ep_method="all_gather"), sequence_length=12).compile(0)
    return seen


def ready(calls: Sequence[Call], made: set[int]) -> list[str]:
    """Calls that read what is not there. `made`: what there is before; results of a collective are there once it is
    finished."""
    there, wrong = set(made), list[str]()
    for call in calls:
        needed = call.ins[:-1] if call.phase == "finish" else call.ins
        wrong += [f"{call.phase} {call.site} reads {r}" for r in needed if r not in there]
        there |= {call.ins[-1]} if call.phase == "finish" else set() if call.phase == "start" else set(call.outs)
    return wrong


def starts(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.phase == "start" and call.site.attrs.get("axis") == "ep"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_call_has_what_it_had(layout: Layout) -> None:
    for before, after in lists(layout):
        assert sorted(map(id, before)) == sorted(map(id, after))
        made = {r for call in before for r in call.outs}
        given = {r for call in before for r in call.ins} - made
        assert ready(before, given) == ready(after, given) == []
        assert starts(before) == starts(after), "all ranks have the collectives of an axis in one order"
        others = [[c for c in calls if not c.site.attrs.get("overlaps")] for calls in (before, after)]
        assert others[0] == others[1], "only collectives of experts move"


def test_a_call_that_reads_too_soon_is_seen() -> None:
    (before, after), *_ = lists(Layout(dp=2, ep=2))
    given = {r for call in before for r in call.ins} - {r for call in before for r in call.outs}
    late = next(i for i, call in enumerate(after) if call.phase == "finish" and call.site.attrs.get("overlaps"))
    moved = [*after[:late], after[late + 1], after[late], *after[late + 2 :]]
    assert ready(moved, given)


def test_tokens_are_gathered_beside_the_router_and_shared_experts() -> None:
    forward, backward = (after for _, after in lists(Layout(dp=2, ep=2)))
    for calls, kind, beside in (
        (forward, "all_gather", {"router", "swiglu"}),
        (backward, "reduce_scatter", {"router", "swiglu"}),
    ):
        for layer in range(MODEL.layers):
            own = [call for call in calls if call.site.layer == layer]
            flights = [
                {other.site.op_name for other in own[own.index(call) : _end(own, call)]}
                for call in own
                if call.phase == "start" and call.site.op_name == kind and call.site.attrs["axis"] == "ep"
            ]
            assert any(beside <= names for names in flights), flights


def test_rows_that_are_written_later_keep_a_start_behind() -> None:
    """Hand-made lists: a second part of what is sent, what overwrites it, and another layer."""
    spec = Spec((4, 2))
    made, sent = Site("linear", (spec,), (spec,), layer=0), Site("all_gather", (spec,), (spec,), attrs=EP, layer=0)
    own, others = Call(made, "forward", (0,), (1,), "own"), Call(made, "forward", (0, 1), (), "others", 1)
    start, finish = Call(sent, "start", (1,), (2,)), Call(sent, "finish", (1, 2), ())
    beside = Call(Site("swiglu", (spec,), (spec,), layer=0), "forward", (0,), (3,))
    reader = Call(made, "forward", (2,), (4,))
    assert overlap([own, others, beside, start, finish, reader]) == [own, others, start, beside, finish, reader]
    over = next(name for name, op in OPS.items() if 0 in op.declaration.overwrites)
    writes = Call(Site(over, (spec,), (spec,), layer=0), "forward", (1,), (5,))
    assert overlap([own, writes, start, finish, beside]) == [own, writes, start, beside, finish]
    assert overlap([own, start, finish, beside, writes]) == [own, start, beside, finish, writes]
    elsewhere = Call(Site("swiglu", (spec,), (spec,), layer=1), "forward", (0,), (3,))
    assert overlap([own, elsewhere, start, finish, elsewhere]) == [own, elsewhere, start, finish, elsewhere]
    before = Call(Site("all_gather", (spec,), (spec,), attrs=EP, layer=0), "start", (0,), (6,))
    assert overlap([own, before, start, finish]) == [before, own, start, finish]


def _end(calls: list[Call], start: Call) -> int:
    return next(i for i, call in enumerate(calls) if call.phase == "finish" and call.site is start.site)

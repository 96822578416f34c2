"""The timeline of a step is the step that is timed: as long, in its streams' order, in a run's ops; and its trace has
the price's memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config import catalog
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.executor import profiled
from penteract.ops.offload import OFFLOAD_OPS
from penteract.readings.estimator import Estimator
from penteract.readings.ideal import PARTS
from penteract.readings.price import price
from penteract.readings.time.clock import PS
from penteract.readings.time.ranks import Ranks
from penteract.readings.time.step import StepClock
from penteract.readings.time.timelines.timeline import Event, Timeline, timeline
from penteract.readings.time.timelines.trace import COMPUTED, kind, program, shown_name, write_trace
from penteract.step import names
from penteract.step.walk import Silent, walk
from strategies import cases, fp8_gather_cases
from tiny import SIZES

NODE = cluster("8xH100")
NARROW = replace(RECIPES["bf16"], reduce="bf16")
DRAWN = draws(8, wide=80)
# What a run does inside of a part that has a name, or waits for where it has none.
INSIDE = {names.NARROW, names.QUANTISE, names.WAIT_GRADIENTS, names.LARGEST, names.ORTHOGONALISE, "copy", *OFFLOAD_OPS}
# And between them: compute stands still until its peers are there. A run names the wait for its sends.
BETWEEN = {names.WAIT_SENT, names.WAIT_RANKS}


@st.composite
def asked(draw: st.DrawFn) -> tuple[Estimator, Layout]:
    case = draw(cases())
    assume(not case.schedule)
    precision: Policy = draw(st.sampled_from([RECIPES["bf16"], NARROW]))
    optimizer_kinds = draw(st.sampled_from([PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]))
    away = case.layout.offload_optimizer and optimizer_kinds is PLAIN
    model = replace(case.model, layers=case.model.layers + draw(st.integers(0, 3)))
    return Estimator(model, NODE, case.sequence_length, precision, optimizer_kinds), replace(
        case.layout, offload_optimizer=away
    )


@DRAWN
@given(asked())
def test_is_the_step_that_is_timed(question: tuple[Estimator, Layout]) -> None:
    prices, lay = question
    told = timeline(prices.steps, lay)
    assert told.picoseconds / PS == prices.time(prices.estimate(lay)).seconds
    assert min(told.span.begins) == 0
    for (stage, stream), some in by_stream(told).items():
        begin = told.span.begins[stage]
        assert begin <= some[0].start
        for one, other in pairwise(some):
            assert one.start <= one.end <= other.start, (stream, one, other)
        if stream == "host":  # it may be behind its device, in every step as far
            assert some[-1].end - some[0].start <= told.picoseconds
            continue
        end = begin + told.picoseconds
        # Gathers after the update go on into the next step.
        assert all(e.name == names.GATHER and not e.action for e in some if e.end > end)


def by_stream(told: Timeline) -> dict[tuple[int, str], list[Event]]:
    found = defaultdict[tuple[int, str], list[Event]](list)
    for e in sorted(told.events, key=lambda e: (e.start, e.end)):
        found[e.pp_rank, e.stream].append(e)
    return found


@DRAWN
@given(asked())
def test_computes_for_as_long_as_the_parts_say(question: tuple[Estimator, Layout]) -> None:
    """And has no hole: what is not of a part is a wait for peers, which the step counts to its pipeline.

    Nothing is slower beside a wire here, as that is no time of its own."""
    prices, lay = question
    steps = StepClock(prices.composer, NODE, replace(prices.rates, contention=1.0))
    told, ranks = timeline(steps, lay), steps.ranks(lay)
    for r in range(lay.pp):
        parts = dict(zip(PARTS, spent(ranks, r), strict=True))
        on = [e for e in told.events if e.pp_rank == r and e.stream == "compute"]
        calls = [e for e in on if kind(e) in COMPUTED]
        assert sum(e.end - e.start for e in calls) == sum(parts[p] for p in ("compute", "attention", "pointwise"))
        waits = sum(e.end - e.start for e in on if e.name in BETWEEN)
        assert sum(e.end - e.start for e in on) - waits == sum(parts.values()) - parts["launch"]
        assert sum(parts.values()) + waits == told.picoseconds


def test_waits_for_the_last_rank_before_the_update() -> None:
    """Backward ends last on the first stage: the others say until when they wait, and that is one moment for all."""
    lay = Layout(pp=4, gradient_accumulation_steps=6, loss="chunked", attention="cudnn")
    told = timeline(Estimator(replace(catalog.model("llama-3.2-1b"), layers=8), cluster("4xH200"), 4096).steps, lay)
    waits = [e for e in told.events if e.name == names.WAIT_RANKS]
    assert [e.pp_rank for e in waits if e.end > e.start] == [1, 2, 3]
    assert len({e.end for e in waits}) == 1 and {(e.stream, e.action, e.unit) for e in waits} == {("compute", "", "")}
    assert all(e.start >= waits[0].end for e in told.events if e.name == names.UPDATE and e.stream == "compute")


def spent(ranks: Ranks, r: int) -> list[int]:
    """Of a rank's last step."""
    begun, ended = ranks.spent_at_end[-2][r], ranks.spent_at_end[-1][r]
    return [sum(n * parts[i] for parts, n in ranks.rank_clocks[r].spent[begun:ended]) for i in range(len(PARTS))]


@DRAWN
@given(asked())
def test_has_the_names_of_a_run(question: tuple[Estimator, Layout]) -> None:
    prices, lay = question
    told = timeline(prices.steps, lay)
    for r in range(lay.pp):
        ran = names_of_a_run(prices.steps, lay, r)
        events = [e for e in told.of(r) if e.stream != "host"]
        computed = [e.name for e in events if e.stream == "compute" and kind(e) in COMPUTED]
        assert computed == [name for name in ran if name.split(" ")[0] in COMPUTED]
        assert names.WAIT_RANKS not in ran  # no kernel
        own = [e for e in events if e.name != names.WAIT_RANKS and not e.name.endswith(" matrices")]
        said = {without_line_of_copy(e.name) for e in own} - INSIDE
        assert {name.removeprefix("largest ") for name in said} <= {without_line_of_copy(name) for name in ran}
        assert sum(e.name == names.MEASURE for e in events) == ran.count(names.MEASURE)


def without_line_of_copy(name: str) -> str:
    """A layer's input is of the layer before, which prices of layers do not know."""
    return name.partition(" (")[0] if any(op_name in name for op_name in OFFLOAD_OPS) else name


def names_of_a_run(steps: StepClock, layout: Layout, stage: int) -> list[str]:
    """What `record_function` is told where a run does nothing."""
    found = list[str]()

    class Idle(Silent):
        p = program(steps, layout, stage)

    @contextmanager
    def record(name: str) -> Iterator[None]:
        found.extend(name.split(names.AND))
        yield

    with patch.object(profiled, "record_function", record):
        walk(Idle.p, profiled.ProfiledExecutor(Idle()))  # type: ignore[arg-type]
    return found


def traced(prices: Estimator, lay: Layout) -> list[dict[str, Any]]:
    lines = list[str]()
    write_trace(prices.steps, lay, lines.append, range(lay.pp))
    return json.loads("".join(lines))["traceEvents"]


@DRAWN
@given(asked())
def test_trace_has_every_event_and_the_memory_of_the_price(question: tuple[Estimator, Layout]) -> None:
    check_trace(*question)


def test_a_cast_of_gradients_has_the_workspace_of_its_bucket() -> None:
    """A small bucket is cast beside registers of routed size, the largest one when most of them are free."""
    experts = MoESpec(experts=4, top_k=1, ffn_size=24, normalize_weights=False)
    model = ModelSpec(name="routed", layers=1, hidden_size=32, heads=8, kv_heads=1, head_size=4, ffn_size=64,
                      vocab_size=64, moe=experts)  # fmt: skip
    gathered = ("tp_all_gather",)
    lay = Layout(cp=4, ep=2, cp_method="all_gather", zero=2, recompute=gathered, recompute_else=gathered)
    check_trace(Estimator(model, NODE, 16, replace(RECIPES["bf16"], reduce="bf16")), lay)


def test_groups_of_equal_size_have_tracks_of_their_own() -> None:
    """Of what two stages share, and of what one stage shards: two streams, two tracks."""
    experts = MoESpec(experts=4, top_k=1, ffn_size=24)
    model = ModelSpec(**SIZES, mtp_layers=1, mtp_loss_coefficient=0.7, moe=experts)
    check_trace(Estimator(model, NODE, 16, RECIPES["bf16"]), Layout(tp=4, pp=2, zero=1))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(fp8_gather_cases())
def test_and_where_weights_travel_in_fp8(case: Case) -> None:
    assume(not case.schedule)
    check_trace(Estimator(case.model, NODE, case.sequence_length, case.precision, case.optimizer_kinds), case.layout)


def check_trace(prices: Estimator, lay: Layout) -> None:
    rows, told = traced(prices, lay), timeline(prices.steps, lay)
    spans = [row for row in rows if row["ph"] == "X"]
    tracks = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert sorted((s["pid"] - 1, tracks[s["tid"]], s["name"], round(s["ts"] * 1000)) for s in spans) == sorted(
        (e.pp_rank, e.stream, shown_name(e)[0], (e.start + 500) // 1000) for e in told.events
    )
    assert all(s["ts"] >= 0 and s["dur"] >= 0 and s["cat"] for s in spans)
    for whole in (round, int):  # how Perfetto reads times: as it is now, and before; it drops what overlaps
        assert not list(overlaps(spans, whole))
    estimate = prices.estimate(lay)
    for r, allocated in enumerate(estimate.by_pp_rank):
        counts = [row for row in rows if row["ph"] == "C" and row["pid"] == r + 1]
        assert round(counts[-1]["ts"] * 1000) == (told.span.begins[r] + told.picoseconds + 500) // 1000
        assert all(one["ts"] <= other["ts"] for one, other in pairwise(counts))
        counted = [row["args"] for row in counts]
        assert all(n >= 0 for owners in counted for n in owners.values())
        peak, whole = max(sum(owners.values()) for owners in counted), price(program(prices.steps, lay, r))
        # Where sizes are data, the sum over layers has registers and workspace at their most, though at other moments.
        apart = min(whole.routed, whole.workspace)
        assert peak == whole.allocated <= allocated
        assert apart or peak == allocated
        registers = max(owners["activations"] for owners in counted)
        assert registers <= whole.arena + whole.routed


def overlaps(spans: list[dict[str, Any]], whole: Callable[[float], int]) -> Iterator[tuple[Any, Any]]:
    """Slices of a track that begin before the one before is done, in whole nanoseconds."""
    tracks = defaultdict[int, list[tuple[int, int]]](list)
    for s in spans:
        tracks[s["tid"]].append((begin := whole(s["ts"] * 1000), begin + whole(s["dur"] * 1000)))
    for some in tracks.values():
        yield from ((one, other) for one, other in pairwise(sorted(some)) if one[1] > other[0])


def test_tracks_are_in_order() -> None:
    """By their numbers, as Perfetto sorts, and by the index by which Chrome does; none has the number of a process."""
    lay = Layout(tp=2, pp=4, loss="chunked", attention="cudnn", gradient_accumulation_steps=6)
    rows = traced(Estimator(replace(catalog.model("llama-3.2-1b"), layers=8), cluster("8xH200"), 4096), lay)
    named = sorted((row["tid"], row["args"]["name"]) for row in rows if row["name"] == "thread_name")
    assert [name for tid, name in named if tid // 1000 == 2] == [
        "compute", "host", "tp (2 ranks)", "world (8 ranks)", "activations from pp rank 0", "activations to pp rank 2",
        "gradients from pp rank 2", "gradients to pp rank 0",
    ]  # fmt: skip
    assert all(row["args"]["sort_index"] == row["tid"] for row in rows if row["name"] == "thread_sort_index")
    assert {row["pid"] for row in rows} == {1, 2, 3, 4} and min(named)[0] > 4


@pytest.mark.parametrize("asked", [{"zero": 1}, {"zero": 3}, {"tp": 2, "pp": 4, "dp": 1}, {"pp": 4, "dp": 2}])
def test_of_a_real_model(asked: dict[str, Any]) -> None:
    """As long as planned, and a peak of its counter that is the price's, to the byte."""
    lay = replace(
        Layout(dp=8, loss="chunked", elementwise="triton", attention="cudnn", gradient_accumulation_steps=6), **asked
    )
    prices = Estimator(replace(catalog.model("llama-3.2-1b"), layers=8), cluster("8xH200"), 4096)
    rows, estimate = traced(prices, lay), prices.estimate(lay)
    peaks = [max(sum(row["args"].values()) for row in rows if row["ph"] == "C" and row["pid"] == r + 1)
             for r in range(lay.pp)]  # fmt: skip
    assert tuple(peaks) == estimate.by_pp_rank
    tracks = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    told = timeline(prices.steps, lay)
    for r, begin in enumerate(told.span.begins):
        on = [row for row in rows if row["ph"] == "X" and row["pid"] == r + 1 and tracks[row["tid"]] == "compute"]
        ends = max(row["ts"] + row["dur"] for row in on)
        assert ends <= begin / 10**6 + prices.time(estimate).seconds * 10**6 + 0.01

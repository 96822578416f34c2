"""What ZeRO 2 and 3 put on wires beside passes: as often as the program does, and no pass is faster for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layouts import Case
from penteract.estimate.composed import Composer
from penteract.estimate.lane import UnitLane, _counts, count_gathers, gather_shares, passing, unit_lanes, unit_reads
from penteract.estimate.quote import Quoter
from penteract.schedule.in_flight import steady
from penteract.spec.hardware import cluster
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.precision import RECIPES
from penteract.spec.presets import TINY
from penteract.step.program import compile_step
from strategies import cases


@settings(max_examples=60)
@given(cases(), st.integers(0, 3))
def test_units_are_gathered_as_often_as_the_program_does(case: Case, deeper: int) -> None:
    assume(case.schedule is None)
    model = replace(case.model, layers=case.model.layers + deeper)
    lay = case.layout if case.layout.zero == 3 else replace(case.layout, zero=3)
    composer, mesh = Composer(model, case.sequence_length, "fp64"), Mesh(lay)
    for at in range(lay.pp):
        p = compile_step(model, lay, case.sequence_length, rank=mesh.group("pp", 0)[at], precision="fp64")
        asked = Counter(e for around in p.events.values() for e in (*around.before, *around.after))
        found, summed = Counter[int](), Counter[int]()
        for i, b in enumerate(p.buckets):
            if b.cut_parameters:
                found[b.unit] = max(found[b.unit], asked["gather", i])
            if b.cut_gradients:
                assert asked["reduce", i] == asked["land", i] == asked["open", i] == lay.gradient_accumulation_steps
                summed[b.unit] += b.size
        runs = composer.packer.runs(lay, at)
        buckets = composer.packer.unit_buckets(lay, runs, at)
        lanes = unit_lanes(runs.units, buckets, lambda kind, b: float(b.size), split=lay.split_backward)
        assert {u: sum(lane.sums.values()) for u, lane in enumerate(lanes) if lane.sums} == +summed
        chunks, rest = list[list[UnitLane]](), lanes
        for chain in composer.chains_of(lay, at):
            n = sum(n for _, n in chain)
            chunks, rest = [*chunks, rest[:n]], rest[n:]
        reads = unit_reads(chunks, lambda kind: composer.piece(lay, kind).read_by)
        shares = gather_shares(lay, at, reads, len(lanes))
        uses = Counter(u for r in reads for some in r.values() for u in some)
        told = {u: share * uses[u] * lay.gradient_accumulation_steps for u, share in shares.items()}
        assert told == pytest.approx(dict(found))


@settings(max_examples=60)
@given(
    st.sampled_from(["1f1b", "afab", "zb_h1", "interleaved"]), st.integers(1, 4), st.integers(2, 3),
    st.integers(1, 5), st.integers(0, 20), st.integers(0, 3),
)  # fmt: skip
def test_long_schedules_gather_as_short_ones_foretell(
    name: str, pp: int, vpp: int, units: int, more: int, rank: int
) -> None:
    assume(rank < pp and (pp > 1 or name != "interleaved"))
    vpp = vpp if name == "interleaved" else 1
    turn = pp if vpp > 1 else 1
    micros = (2 * steady(pp, vpp) // turn + 5 + more) * turn
    back = ("Inp", "Wgt") if name == "zb_h1" else ("Bwd",)
    reads = list[tuple[tuple[str, tuple[int, ...]], ...]]()
    for c in range(vpp):
        own = tuple(range(c * units, (c + 1) * units))
        reads.append((("Fwd", own), (back[0], own[::-1])))
    asked = (rank, 2, tuple(reads))
    assert _counts(name, pp, vpp, micros, asked) == count_gathers(name, pp, vpp, micros, asked)


def test_a_unit_takes_as_long_as_the_slower_of_its_work_and_its_lane() -> None:
    """By hand: three units; the second's gather is under the first, the first's sum under the last before it."""
    units = [UnitLane("a", frozenset("x"), g, {"Bwd": s}) for g, s in ((5.0, 1.0), (1.0, 2.0), (18.0, 3.0))]
    told = passing(units, lambda kind: {"Fwd": 4.0, "Bwd": 6.0}, [1.0, 1.0, 0.5], 1.0)
    assert told.seconds["Fwd"] == 4 + 9 + 5  # above them go 1, 9, 5
    assert told.seconds["Bwd"] == 6 + (5 + 3) + (9 + 2)  # in the order 2, 1, 0: 1 + 1, 5 + 3, 9 + 2
    assert told.exposed == {"Fwd": 6.0, "Bwd": 7.0}
    units[2].coding = 0.5  # before half of its readings, above nothing
    again = passing(units, lambda kind: {"Fwd": 4.0, "Bwd": 6.0}, [1.0, 1.0, 0.5], 1.0)
    assert again.exposed == {"Fwd": 6.25, "Bwd": 7.25}


def test_codes_spare_wires_and_memory_but_no_work() -> None:
    """Of a model whose gathers take long, on a slow network: faster; the ring of parameters is half as large."""
    model = replace(TINY, hidden_size=4096, heads=32, kv_heads=32, head_size=128, ffn_size=8192)
    fp8 = RECIPES["fp8_tensorwise"].fp8
    assert fp8
    told = dict[bool, tuple[float, int]]()
    for gather in (False, True):
        policy = replace(RECIPES["fp8_tensorwise"], fp8=replace(fp8, gather=gather))
        prices = Quoter(model, cluster("16xH100"), 256, policy)
        quote = prices.quote(Layout(dp=16, zero=3, whole_gradients=True))
        time = prices.time(quote)
        assert quote.at_least <= prices.bound(quote) <= time.seconds
        told[gather] = time.parts["data"], quote.memory["other"]
    linears = 4 * 4096**2 + 3 * 4096 * 8192
    assert told[True][0] < 0.9 * told[False][0]
    assert told[False][1] - told[True][1] >= 2 * linears - 16 * 7 * TINY.layers


def test_stages_cost_time_and_spare_memory() -> None:
    """Each stage keeps less than the one before, and what it puts on wires beside the passes is no time won."""
    prices = Quoter(TINY, cluster("4xH200"), 256)
    base = Layout(dp=4, gradient_accumulation_steps=4)
    told = {z: prices.quote(replace(base, zero=z)) for z in range(4)}
    states = [sum(told[z].memory[k] for k in ("parameters", "gradients", "optimizer")) for z in range(4)]
    assert states == sorted(states, reverse=True) and len({*states}) == 4
    seconds = {z: prices.time(told[z]).seconds for z in range(4)}
    assert seconds[3] >= seconds[2]
    for flags in ({}, {"whole_gradients": True}, {"keep_gathered": True}, {"shard_group": 2}):
        for schedule, pp in (("1f1b", 1), ("1f1b", 2), ("afab", 2), ("zb_h1", 2)):
            lay = Layout(dp=4 // pp, pp=pp, schedule=schedule, gradient_accumulation_steps=4, zero=3, **flags)
            quote = prices.quote(lay)
            time = prices.time(quote)
            assert quote.at_least <= time.seconds * (1 + 1e-9)
            assert sum(time.parts.values()) == pytest.approx(time.seconds)
            assert sum(quote.memory.values()) == quote.allocated == max(quote.by_stage)

"""A rank's traffic is the price's, channel by channel, over groups that are enumerated here; its seconds are those of
the simulated step's streams."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES
from penteract.readings.estimator import Estimator
from penteract.readings.price import price
from penteract.readings.rank_traffic import Channel, traffic
from penteract.readings.time.timelines.timeline import timeline
from penteract.readings.time.timelines.trace import program
from penteract.step import names
from strategies import cases

TINY = ModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=4, head_size=16, ffn_size=128, vocab_size=256)

DRAWN = draws(16)
OWN = ("compute", "host", "waits beside compute", "copies")


@st.composite
def asked(draw: st.DrawFn) -> tuple[Estimator, Layout, Case]:
    case = draw(cases())
    assume(not case.schedule)
    times = draw(st.sampled_from([1, 1, 4, 9]))  # as long as a step that is extrapolated
    lay = case.layout.put(gradient_accumulation_steps=case.layout.gradient_accumulation_steps * times)
    case = replace(case, layout=lay)
    kinds = draw(st.sampled_from([PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]))
    precision = draw(st.sampled_from([RECIPES["bf16"], replace(RECIPES["bf16"], reduce="bf16")]))
    node = cluster(draw(st.sampled_from(["8xH100", "4x2xH100"])))
    case = replace(case, precision=precision, optimizer_kinds=kinds)
    return Estimator(case.model, node, case.sequence_length, precision, kinds), case.layout, case


@DRAWN
@given(asked(), st.data())
def test_the_bytes_are_those_of_the_price_over_the_groups_of_the_mesh(
    question: tuple[Estimator, Layout, Case], data: st.DataObject
) -> None:
    prices, lay, case = question
    p = case.compile(data.draw(st.integers(0, lay.world - 1)))
    found = Counter[tuple[str, tuple[int, ...]]]()
    for (kind, ranks, axis, what), sent in traffic(prices.steps, lay, p.rank).found.items():
        found[kind, ranks] += sent.size
        assert sent.calls > 0 and len(ranks) > 1 and p.rank in ranks
        if what == names.of_matrices(kind):  # of keys and values that several tensor ranks share, one of them
            assert axis == "dp" or any({*ranks} <= {*one} for one in groups(lay)[axis])
        elif axis != "dp" and kind not in ("send", "recv"):
            assert ranks in groups(lay)[axis]
        elif axis in ("pp", "cp") and kind in ("send", "recv"):
            assert any({*ranks} <= {*one} for one in groups(lay)[axis])
    assert +found == Counter({wire: n for wire, n in price(p).wires.items() if len(set(wire[1])) > 1 and n})


@DRAWN
@given(asked())
def test_the_seconds_are_those_of_the_simulated_streams(question: tuple[Estimator, Layout, Case]) -> None:
    prices, lay, _ = question
    told = timeline(prices.steps, lay)
    for stage, begin in enumerate(told.span.begins):
        busy, messages = 0, 0
        for e in told.events:
            if e.pp_rank != stage or e.stream.startswith(OWN):
                continue
            if " pp rank " in e.stream:
                messages += e.end - e.start
                continue
            busy += e.end - e.start
            if not e.action and (late := e.end - told.picoseconds) > begin:  # drawn again, as the step before leaves it
                busy -= late - max(begin, e.start - told.picoseconds)
        own = traffic(prices.steps, lay, stage * lay.world // lay.pp).found
        assert sum(sent.picoseconds for c, sent in own.items() if c.axis != "pp") == busy
        assert sum(sent.picoseconds for c, sent in own.items() if c.axis == "pp") == messages


def test_matrices_of_shared_heads_are_gathered_from_one_rank_of_each() -> None:
    """Four tensor ranks, two heads of keys and values: ranks 0 and 1 hold the same one."""
    model = replace(TINY, kv_heads=2)
    kinds = OptimizerKinds(matrices=OptimizerKind("muon", 2))
    prices = Estimator(model, cluster("4xH100"), 32, RECIPES["bf16"], kinds)
    found = traffic(prices.steps, Layout(tp=4), 0).found
    gathers = {c.ranks for c in found if c.what == names.of_matrices("all_gather")}
    assert gathers == {(0, 1, 2, 3), (0, 2)}


def test_a_known_layout() -> None:
    """Two replicas of two tensor ranks: by hand, a bf16 gather of all parameters, and their fp32 gradients."""
    lay = Layout(dp=2, tp=2, zero=1, loss="chunked", attention="flash", bucket_bytes=2**30)
    prices = Estimator(TINY, cluster("4xH100"), 32)
    found = traffic(prices.steps, lay, 0).found
    whole = sum(n for c, n in ((c, s.size) for c, s in found.items()) if c.what == "all_gather parameters")
    held = program(prices.steps, lay, 0).params
    split, alike = (sum(numbers(p.shape) for p in held if bool(p.shards) is cut) for cut in (True, False))
    assert whole == 2 * (split // 2 + alike)
    grads = {c: s.size for c, s in found.items() if c.what == "reduce_scatter gradients"}
    assert grads == {Channel("reduce_scatter", (0, 2), "dp", "reduce_scatter gradients"): 4 * (split // 2),
                     Channel("reduce_scatter", (0, 1, 2, 3), "dp", "reduce_scatter gradients"): 4 * alike}  # fmt: skip


def numbers(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def groups(lay: Layout) -> dict[str, set[tuple[int, ...]]]:
    """Every group of each axis: the ranks are numbered one by one, tensor ranks first, then context, data, pipeline."""
    number, found = {}, {}
    for at in product(range(lay.pp), range(lay.dp), range(lay.cp), range(lay.tp)):
        number[at] = len(number)
    same = {
        "tp": lambda pp, dp, cp, tp: (pp, dp, cp), "cp": lambda pp, dp, cp, tp: (pp, dp, tp),
        "dp": lambda pp, dp, cp, tp: (pp, cp, tp), "pp": lambda pp, dp, cp, tp: (dp, cp, tp),
        "ep": lambda pp, dp, cp, tp: (pp, (dp * lay.cp + cp) // lay.ep, tp), "dp_cp_tp": lambda pp, dp, cp, tp: pp,
        "sequence": lambda pp, dp, cp, tp: (pp, dp), "world": lambda pp, dp, cp, tp: (),
    }  # fmt: skip
    for axis, key in same.items():
        some: dict[object, list[int]] = {}
        for at, rank in number.items():
            some.setdefault(key(*at), []).append(rank)
        found[axis] = {tuple(sorted(ranks)) for ranks in some.values()}
    return found

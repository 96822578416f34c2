"""The space: the same counts and layouts as the rules asked of every whole layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draws import draws
from penteract.config.device_words import CPU
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import CP_METHODS, EP_METHODS, Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import TINY, preset
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.model.count import head_in_layers
from penteract.parallel.pipeline import balanced
from penteract.planner.ask import EDITS, Ask, parse_settings
from penteract.planner.space.layout_families import MemoryOptions
from penteract.planner.space.layouts import Space, divisors
from penteract.planner.space.legality import CROSSES, reason
from penteract.schedule.registry import SCHEDULES
from penteract.schedule.schedule import Placement

EXPERTS = st.builds(MoESpec, experts=st.sampled_from([4, 6, 8]), top_k=st.just(2), ffn_size=st.sampled_from([6, 8, 12]))
MODELS = st.builds(
    ModelSpec, layers=st.integers(1, 9), hidden_size=st.just(24), heads=st.sampled_from([4, 6, 8, 12]),
    kv_heads=st.sampled_from([1, 2]), head_size=st.just(4), ffn_size=st.sampled_from([12, 16, 24]),
    vocab_size=st.sampled_from([16, 23, 24, 2880]), moe=st.none() | EXPERTS,
)  # fmt: skip


def asked(model: ModelSpec, gpus: int, length: int, batch: int, **more: object) -> Ask:
    return Ask(model=model, cluster=Cluster(gpus=gpus), sequence_length=length, global_batch_size=batch, **more)  # type: ignore[arg-type]


def sharings(ask: Ask, rows: int, tp: int) -> list[tuple[int, int, bool, bool]]:
    """(zero, shard_group, reduce_scatter_once, reshard_after_step)"""
    if rows == 1:
        return [(0, 0, False, False)]
    node = ask.cluster.gpus_per_node // tp
    several = ask.cluster.gpus_per_node % tp == 0 and 1 < node < rows and rows % node == 0
    found = [(0, 0, False, False)]
    for group in (0, node) if several else (0,):
        found += [(1, group, False, False), (2, group, False, False), (3, group, False, False)]
        found += [(3, group, True, False), (3, group, False, True)]
    return found


def layouts(space: Space, refused: Counter[str]) -> Iterator[Layout]:
    return (lay for family in space.families(refused) for run in family.runs() for lay in run)


def by_hand(ask: Ask) -> list[Layout]:
    """The product of the values that `Space` says it tries, written a second time, one layout at a time."""
    gpus, layers, moe, total = ask.cluster.gpus, ask.model.layers, ask.model.moe, ask.global_batch_size
    found: list[Layout] = []
    for dp, tp, pp, cp in product(range(1, gpus + 1), repeat=4):
        if dp * tp * pp * cp != gpus:
            continue
        pipes: list[tuple[str, int]] = [("1f1b", 1)]
        if pp > 1:
            longest = {-(-layers // (pp * n)): n for n in range(layers // pp, 1, -1)}
            pipes += [("gpipe", 1), ("zb_h1", 1), *(("interleaved", n) for n in set(longest.values()) or {2})]
        staged = [
            (name, vpp, less)
            for name, vpp in pipes
            for less in sorted({0, least_work(ask, SCHEDULES[name].placement(pp, vpp))})
        ]
        share = total // dp
        sizes = [n for n in range(1, share + 1) if share % n == 0] if total % dp == 0 else [1]
        for pipe, method, ep, expert_tp, zero, recompute, size in product(
            staged, CP_METHODS if cp > 1 else ["all_gather"],
            [n for n in range(1, dp * cp + 1) if dp * cp % n == 0] if moe else [1],
            {1, tp} if moe else [1], sharings(ask, dp * cp, tp), [("tp_all_gather",), ("*",)], sizes,
        ):  # fmt: skip
            if (zero[2] or zero[3]) and max(1, total // (dp * size)) == 1:
                continue
            found.extend(
                Layout(
                    dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_tp=expert_tp, schedule=pipe[0], vpp=pipe[1],
                    last_stage_less_layers=pipe[2], ep_method=sent,
                    cp_method=method, zero=zero[0], shard_group=zero[1], reduce_scatter_once=zero[2],
                    reshard_after_step=zero[3], recompute=recompute, micro_batch_size=size, loss="chunked",
                    gradient_accumulation_steps=max(1, total // (dp * size)),
                )  # type: ignore[arg-type]
                for sent in ways_of_tokens(moe.top_k if moe else 0, ep)
            )  # fmt: skip
    return found


def ways_of_tokens(top_k: int, ep: int) -> list[str]:
    """A token has at most `top_k` copies to send, or goes to ep - 1 ranks."""
    if 1 < ep < top_k:
        return ["all_gather"]
    return ["all_to_all", "all_gather"] if 1 < ep <= 2 * top_k else ["all_to_all"]


def least_work(ask: Ask, placement: Placement) -> int:
    """The `last_stage_less_layers` that lets the slowest pipeline rank have the least work."""
    return balanced(ask.model.layers, placement, head_in_layers(ask.model, ask.sequence_length))


@draws(10, wide=125)
@given(MODELS, st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from([8, 12, 24, 30]), st.sampled_from([1, 4, 6, 8]))
@example(TINY, 8, 16, 8)
def test_parts_refuse_what_the_rules_refuse(model: ModelSpec, gpus: int, length: int, batch: int) -> None:
    """Layouts, counts and reasons equal those of `breaches` over the whole product."""
    ask, refused = asked(model, gpus, length, batch), Counter[str]()
    legal = list(layouts(Space(ask), refused))
    expected, reasons = set[Layout](), Counter[str]()
    everything = by_hand(ask)
    for lay in everything:
        case = Case(model=model, layout=lay, sequence_length=length, global_batch_size=batch, world=gpus)
        if found := breaches(case):
            reasons[reason(found[0])] += 1
        else:
            expected.add(lay)
    assert Space(ask).enumerated == len(everything)
    assert len(legal) == len(set(legal))
    assert set(legal) == expected
    assert refused == reasons


@pytest.mark.parametrize("experts", [False, True])
def test_parts_refuse_what_the_rules_refuse_on_several_nodes(*, experts: bool) -> None:
    """Groups of a node, which experts may not divide."""
    model = replace(TINY, moe=MoESpec(experts=6, top_k=2, ffn_size=32)) if experts else TINY
    ask = asked(model, 12, 24, 6)
    ask = replace(ask, cluster=Cluster(gpus=12, gpus_per_node=4), tp_across_nodes=True)
    refused = Counter[str]()
    legal, everything = set(layouts(Space(ask), refused)), by_hand(ask)
    cases = (Case(model=model, layout=lay, sequence_length=24, global_batch_size=6, world=12) for lay in everything)
    found = {case.layout: breaches(case) for case in cases}
    assert legal == {lay for lay, wrong in found.items() if not wrong}
    assert refused == Counter(reason(wrong[0]) for wrong in found.values() if wrong)
    assert {lay.shard_group for lay in legal} == {0, 2, 4}
    assert any("shard_group" in why for why in refused) == experts


def test_a_family_decides_every_field_of_a_layout() -> None:
    """A new field is in one of its parts, or no plan but the default has it."""
    family = next(Space(asked(TINY, 8, 256, 16)).families(Counter()))
    decided = {*family.rest, *MemoryOptions._fields, *EDITS, "micro_batch_size", "gradient_accumulation_steps"}
    assert decided == {f.name for f in fields(Layout)}


def test_a_family_differs_in_the_micro_batch_alone() -> None:
    families = [run for family in Space(asked(TINY, 8, 256, 16)).families(Counter()) for run in family.runs()]
    assert any(len(f) > 2 for f in families)
    for family in families:
        sizes = [lay.micro_batch_size for lay in family]
        assert sizes == sorted(set(sizes))
        assert {lay.global_batch_size for lay in family} == {16}


def test_any_divisor_is_a_degree() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    meshes = Space(asked(TINY, 12, 256, 12)).meshes
    assert len(meshes) == 40  # 12 = 2²·3: C(2+3, 3)·C(1+3, 3) ordered factorisations into four
    assert all(prod(mesh) == 12 for mesh in meshes)
    assert {dp for dp, *_ in meshes} == {1, 2, 3, 4, 6, 12}


def test_tensor_groups_stay_on_a_node_unless_asked() -> None:
    model = preset("llama-3.1-8b").model
    refused = Counter[str]()
    inside = Space(asked(model, 16, 8192, 16))
    assert max(lay.tp for lay in layouts(inside, refused)) == 8
    assert refused[CROSSES] > 0
    across = Space(asked(model, 16, 8192, 16, tp_across_nodes=True))
    assert max(lay.tp for lay in layouts(across, Counter())) == 16


@pytest.mark.parametrize(
    ("pins", "kept"),
    [
        ({"tp": (2,)}, lambda lay: lay.tp == 2),
        ({"recompute": ("none",), "zero": (1,)}, lambda lay: lay.recompute == ("tp_all_gather",) and lay.zero == 1),
        ({"schedule": ("interleaved",), "vpp": (3,)}, lambda lay: lay.vpp == 3),
        ({"micro_batch_size": (1, 2), "pp": (1, 2)}, lambda lay: lay.micro_batch_size < 3 and lay.pp < 3),
        ({"zero": (3,), "reduce_scatter_once": (True,)}, lambda lay: lay.zero == 3 and lay.reduce_scatter_once),
        ({"loss": ("reference",), "bucket_bytes": (0,)}, lambda lay: lay.loss == "reference" and not lay.bucket_bytes),
        ({"shard_group": (2,)}, lambda lay: lay.shard_group == 2 and lay.zero > 0),
        ({"cp_method": ("ring",)}, lambda lay: lay.cp > 1 and lay.cp_method == "ring"),
        ({"ep_method": ("all_to_all",)}, lambda lay: lay.ep_method == "all_to_all"),
    ],
)  # fmt: skip
def test_pins_hold(pins: dict[str, tuple[object, ...]], kept: object) -> None:
    model = preset("llama-3.1-8b").model
    space, refused = Space(asked(model, 8, 8192, 24, pins=pins)), Counter[str]()
    legal = list(layouts(space, refused))
    assert legal
    assert all(map(kept, legal))  # type: ignore[arg-type]
    assert space.enumerated == len(legal) + refused.total()


def test_tokens_go_to_other_ranks_by_one_way_or_several() -> None:
    """Each layout once, and all are counted; where no ranks share experts, there is nothing to choose."""
    model = replace(TINY, moe=MoESpec(experts=16, top_k=4, ffn_size=32))
    several = {"ep_method": ("all_to_all", "all_gather")}
    for pins, tried in (({}, {2: 1, 4: 2, 8: 2}), (several, {2: 2, 4: 2, 8: 2})):
        refused, space = Counter[str](), Space(asked(model, 8, 32, 8, pins=pins))
        legal = list(layouts(space, refused))
        assert len(legal) == len(set(legal)) and space.enumerated == len(legal) + refused.total()
        ways = {ep: {lay.ep_method for lay in legal if lay.ep == ep} for ep in (1, *tried)}
        assert ways.pop(1) == {"all_to_all"} and {ep: len(found) for ep, found in ways.items()} == tried
    gathered = layouts(Space(asked(model, 8, 32, 8, pins={"ep_method": ("all_gather",)})), Counter())
    assert all(lay.ep > 1 and lay.ep_method == "all_gather" for lay in gathered)


def test_rows_are_padded_where_ranks_share_experts() -> None:
    """Elsewhere, and with a product for each expert, the layout is refused, and counted."""
    model = replace(TINY, moe=MoESpec(experts=16, top_k=4, ffn_size=32))
    pins = {"expert_rows": ("exact", "padded"), "experts": ("reference", "grouped"), "ep_method": EP_METHODS}
    refused, space = Counter[str](), Space(asked(model, 4, 32, 8, pins=pins))
    legal = list(layouts(space, refused))
    assert len(legal) == len(set(legal)) and space.enumerated == len(legal) + refused.total()
    padded = [lay for lay in legal if lay.expert_rows == "padded"]
    assert {lay.ep for lay in padded} == {2, 4} and all(lay.pads_rows and lay.experts == "grouped" for lay in padded)
    found = Counter(why.partition(":")[0] for why in refused.elements())
    assert found["experts' rows are padded where ranks share experts"]
    assert {lay.sends_blocks for lay in padded} == {False, True}
    assert found["rows are padded for products by groups"]
    for lay in legal[:: max(1, len(legal) // 50)]:
        assert not breaches(Case(model=model, layout=lay, sequence_length=32))


def test_gpus_try_padded_rows_where_few_ranks_gather_tokens() -> None:
    """And exact ones beside them; nothing is refused for it. Elsewhere nothing but exact rows is counted."""
    model = replace(TINY, hidden_size=64, moe=MoESpec(experts=16, top_k=4, ffn_size=64))
    ask = replace(asked(model, 8, 32, 8), cluster=cluster("8xH200"))
    refused, space = Counter[str](), Space(ask)
    legal = list(layouts(space, refused))
    assert len(legal) == len(set(legal)) and space.enumerated == len(legal) + refused.total()
    assert not any("padded" in why for why in refused)
    padded = {lay for lay in legal if lay.expert_rows == "padded"}
    few = {lay for lay in legal if lay.gathers_tokens and lay.ep < 8}
    assert few == padded | {lay.put(expert_rows="exact") for lay in padded}
    assert {lay.ep for lay in padded} == {2, 4} and {lay.ep for lay in legal if lay.gathers_tokens} == {2, 4, 8}
    held = Space(replace(ask, pins={"expert_rows": ("padded",), "ep": (8,), "ep_method": ("all_gather",)}))
    assert {(lay.ep, lay.expert_rows) for lay in layouts(held, Counter())} == {(8, "padded")}
    gpu, fp8 = ask.cluster.gpu, RECIPES["fp8_rowwise"]
    assert gpu is not None and fp8.fp8 is not None
    for other in (
        replace(ask, pins={"experts": ("reference",)}), replace(ask, pins={"ep_method": ("all_to_all",)}),
        replace(ask, pins={"expert_rows": ("exact",)}), replace(ask, cluster=cluster("8xA100")),
        replace(ask, cluster=replace(ask.cluster, gpu=replace(gpu, name=CPU))),
        replace(ask, precision=replace(fp8, fp8=replace(fp8.fp8, experts=True))),
    ):  # fmt: skip
        assert {lay.expert_rows for lay in layouts(Space(other), Counter())} == {"exact"}


def test_experts_kernels_are_tried_where_they_fit() -> None:
    """Rows of a rank's part of an expert are a multiple of eight numbers, or the reference multiplies them."""
    model = replace(TINY, moe=MoESpec(experts=4, top_k=2, ffn_size=24))
    ask = replace(asked(model, 2, 256, 4), cluster=cluster("2xH200"))
    chosen = {(lay.expert_tp, lay.experts) for lay in layouts(Space(ask), Counter())}
    assert chosen == {(1, "quack"), (2, "reference")}
    without = {(lay.expert_tp, lay.experts) for lay in layouts(Space(replace(ask, packages=frozenset())), Counter())}
    assert without == {(1, "grouped"), (2, "reference")}
    space, refused = Space(replace(ask, pins={"experts": ("reference", "grouped")})), Counter[str]()
    legal = list(layouts(space, refused))
    assert {(lay.expert_tp, lay.experts) for lay in legal} == {(1, "reference"), (1, "grouped"), (2, "reference")}
    assert space.enumerated == len(legal) + refused.total()
    assert any("takes rows of a multiple of" in why for why in refused)


def test_reasons_have_no_numbers_of_their_own() -> None:
    model = preset("qwen3-30b-a3b").model
    refused = Counter[str]()
    list(Space(asked(model, 48, 8190, 36)).families(refused))
    assert len(refused) > 4
    assert not [why for why in refused if any(c.isdigit() for c in why.replace("2·cp", ""))]


def test_pinned_values_are_a_set_whatever_their_order() -> None:
    one, other = (
        parse_settings(text, flag="--fix", several=True)
        for text in ("mbs=16/1/16,recompute=full/none", "mbs=1/16,recompute=none/full")
    )
    assert one == other


def test_bitwise_layouts_have_kernels_that_repeat() -> None:
    """Where none is there, plain torch's; another that is pinned is refused, and counted."""
    ask = replace(asked(TINY, 2, 256, 4), cluster=cluster("2xH200"), pins={"determinism": ("off", "bitwise")})
    for packages, bitwise in ((ask.packages, "fa4"), (frozenset[str](), "reference")):
        refused, space = Counter[str](), Space(replace(ask, packages=packages))
        legal = list(layouts(space, refused))
        assert len(legal) == len(set(legal)) and space.enumerated == len(legal) + refused.total()
        kernels = {lay.attention for lay in legal if lay.determinism == "bitwise" and lay.cp == 1}
        assert bitwise in kernels and "cudnn" not in kernels
        assert ask.text(next(lay for lay in legal if lay.determinism == "bitwise")).endswith("determinism=bitwise")
    pinned = Space(replace(ask, pins={"determinism": ("bitwise",), "attention": ("cudnn",)}))
    refused = Counter[str]()
    assert not list(layouts(pinned, refused))
    assert any("adds gradients in any order" in why for why in refused)

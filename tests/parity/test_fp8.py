"""Each recipe of FP8 on a layout is the same in one process: the same scales, so the same data; and its price.

In float64 beside the data, so that what is left is rounding of the last bits: a scale of another group shows at once.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given

from draws import draws, further
from layouts import Case, Subject, _prepare, _step, made_once
from penteract.config.layout import FUSIONS, Fusion, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.config.precision import sampled_rows
from penteract.config.precision.fp8 import Fp8, usual
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.device.storages import bytes_of
from penteract.engine.executor import executor as run_module
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.quantised import fp8_linear
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops import casts
from penteract.readings.composed import Composer
from penteract.readings.explain.why import why
from penteract.readings.price import price, resident
from penteract.step.program import compile_step
from penteract.step.walk import walk
from pool import Pool
from readings.test_why import check_sums
from strategies import cast_once_cases
from tolerances import PARITY

DENSE = ModelSpec(
    layers=3, hidden_size=32, heads=2, kv_heads=2, head_size=32, ffn_size=64, vocab_size=64, initial_std=0.1
)
LATENT = replace(
    DENSE, layers=2, head_size=32, latent=LatentSpec(kv_rank=16, plain_size=16, rope_size=16, value_size=16)
)
EXPERTS = replace(DENSE, moe=MoESpec(experts=4, top_k=2, ffn_size=32, shared_ffn_size=32, dense_layers=(0,)))
RECIPE = {
    "tensorwise": usual("tensorwise"),
    "delayed": replace(usual("delayed"), history=3),
    "rowwise": usual("rowwise"),
    "blockwise": replace(usual("blockwise"), block=16, powers=True),
    "first and last layer in bf16": Fp8(kind="rowwise", first=1, last=1),
}
GATHERED = replace(usual("tensorwise"), gather=True)
PLACES = [
    (DENSE, Layout(dp=2, tp=2, zero=2, bucket_bytes=2**12)),
    (DENSE, Layout(tp=2, cp=2, gradient_accumulation_steps=2, recompute=("tp_all_gather", "linear"))),
    (DENSE, Layout(pp=3, gradient_accumulation_steps=3, schedule="zb_h1")),
    (LATENT, Layout(tp=2, cp=2, cp_method="ring")),
    (EXPERTS, Layout(dp=2, cp=2, ep=2)),
]


def length(model: ModelSpec) -> int:
    """Latents are made of tokens that are cut over tp too: there are enough for blocks of them."""
    return 128 if model.latent else 64


def on_its_own(case: Case) -> Case:
    """One process that takes the same micro-batches one after the other."""
    lay = case.layout
    micro_batches = lay.dp * lay.gradient_accumulation_steps
    own = Layout(micro_batch_size=lay.micro_batch_size, gradient_accumulation_steps=micro_batches, fuse=lay.fuse)
    return replace(case, layout=own)


def remember(run: Executor, past: dict[str, list[float]]) -> None:
    """A past for delayed scales, the same everywhere."""
    if run.state.history is not None:
        for i, name in enumerate(run.state.history.names):
            run.state.history.steps[1, i] = run.state.history.steps.new_tensor(past[name])


@dataclass(frozen=True)
class Whole:
    """What a step in one process made: gradients, the largest values that delayed scales saw, and the loss."""

    gradients: dict[str, torch.Tensor]
    history: dict[str, list[float]]
    loss: torch.Tensor


def in_one_process(case: Case) -> Whole:
    run = _prepare(on_its_own(case).compile(0), ProcessGroups(), dict(REFERENCE))
    walk(run.p, run)
    history = run.state.history
    seen = dict(zip(history.names, history.steps[0].tolist(), strict=True)) if history is not None else {}
    return Whole(run.state.gradients, seen, run.totals[1])


def held_by_some_rows(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    """The same where any number of rows is enough for a sample: one process samples if the layout's ranks do."""
    least, sampled_rows.LEAST_ROWS = sampled_rows.LEAST_ROWS, 1
    try:
        return held(rank, groups, case, {}, least if case.layout.tp * case.layout.cp > 1 else 1)
    finally:
        sampled_rows.LEAST_ROWS = least


def held(
    rank: int, groups: ProcessGroups, case: Case, past: dict[str, list[float]], least: int = sampled_rows.LEAST_ROWS
) -> list[str]:
    """What is wrong on this rank. `least`: rows of which one process takes a sample."""
    p = case.compile(rank)
    groups.make(needed(p))
    with ExitStack() as patches:
        subject = Subject(p, p, dict(REFERENCE), patches)
        begin = Executor.begin

        def reminded(run: Executor) -> None:
            remember(run, past)
            begin(run)

        Executor.begin = reminded  # type: ignore[method-assign]
        try:
            run, verdict = _step(subject, groups)
            sampled_rows.LEAST_ROWS = least
            one: Whole = made_once(rank, groups, case.layout, lambda: in_one_process(case))
        finally:
            Executor.begin = begin  # type: ignore[method-assign]
    wrong = [f"{kind}: {what}" for kind, what in verdict.differences]
    if (history := run.state.history) is not None:
        kept = bytes_of([history.steps, history.past_amax, history.amax])
        there = resident(p)["data"] - resident(replace_recipe(p.rank, case))["data"]
        if kept != there:
            wrong.append(f"history: priced {there}, allocated {kept}")
        wrong += [
            f"{n}: saw {x.tolist()}, one process {one.history[n]}"
            for n, x in zip(history.names, history.steps[0], strict=True)
            if max(abs(a / b - 1) for a, b in zip(x.tolist(), one.history[n], strict=True)) > 1e-6
        ]
    for piece in run.state.parameter_parts("gradient"):
        whole_gradient = one.gradients[piece.param.name]
        part = whole_gradient
        for dim, (at, n) in enumerate(
            zip(piece.param.offset(p.mesh, p.rank), piece.param.local_shape(p.mesh), strict=True)
        ):
            part = part.narrow(dim, at, n)
        part = part.reshape(-1)[piece.begin : piece.begin + len(piece.values)]
        error = ((piece.values - part).abs().max() / whole_gradient.abs().max()).item()
        if not error < PARITY:
            wrong.append(f"{piece.param.name} is off by {error:.1e}")
    if not abs(run.totals[1] / one.loss - 1) < PARITY:
        wrong.append(f"loss {run.totals[1]}, of one process {one.loss}")
    return wrong


def replace_recipe(rank: int, case: Case):
    """The same step without FP8."""
    return replace(case, precision=RECIPES["fp64"]).compile(rank)


def names(model: ModelSpec) -> dict[str, list[float]]:
    """Largest values of some past, of each linear: other than those of now, but near them."""
    p = compile_step(model, Layout(), 64, precision=replace(RECIPES["fp64"], fp8=RECIPE["delayed"]))
    return {s.params[0]: [3.0 + i % 3, 0.3, 1e-3 * (1 + i % 5)] for i, s in enumerate(p.delayed_scaling)}


SWEPT = {
    (i, j): (model, layout, name)
    for i, (model, layout) in enumerate([*PLACES, (DENSE, Layout(dp=2, zero=3))]) for j, name in enumerate(RECIPE)
    if model.layers > RECIPE[name].first + RECIPE[name].last
}  # fmt: skip
FEW = [case for (i, j), case in SWEPT.items() if (i + j) % 5 < 2]


def test_every_recipe_is_tried_at_two_places_and_every_place_with_two_recipes() -> None:
    for of in (0, 1):
        tried = [at[of] for at, case in SWEPT.items() if case in FEW]
        assert all(tried.count(at[of]) >= 2 for at in SWEPT)


@pytest.mark.parametrize(
    ("model", "layout", "name"), [*FEW, *further(case for case in SWEPT.values() if case not in FEW)], ids=str
)
def test_a_layout_is_one_process(pool: Pool, model: ModelSpec, layout: Layout, name: str) -> None:
    policy = replace(RECIPES["fp64"], fp8=RECIPE[name])
    told = pool.run(held, Case(model, layout, length(model), precision=policy), names(model))
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


# Where keys travel, projections are not merged and do not share a scale: one process must not merge them either.
CAST_ONCE = [
    (DENSE, Layout(fuse=("fp8",), gradient_accumulation_steps=2)),
    (DENSE, Layout(dp=2, tp=2, zero=2, bucket_bytes=2**12, fuse=FUSIONS)),
    (
        DENSE,
        Layout(tp=2, cp=2, gradient_accumulation_steps=2, recompute=("tp_all_gather", "linear"), fuse=("mlp", "fp8")),
    ),
    (DENSE, Layout(tp=2, cp=2, recompute=("tp_all_gather", "quantise", "rms_norm"), fuse=("norm", "mlp", "fp8"))),
    (DENSE, Layout(pp=3, gradient_accumulation_steps=3, schedule="zb_h1", fuse=FUSIONS)),
    (DENSE, Layout(dp=2, zero=3, recompute=("*",), fuse=FUSIONS)),
    (DENSE, Layout(dp=2, offload=("linear", "quantise"), fuse=FUSIONS)),
    (LATENT, Layout(tp=2, cp=2, cp_method="ring", fuse=FUSIONS)),
    (EXPERTS, Layout(dp=2, cp=2, ep=2, fuse=("norm", "mlp", "fp8"))),
]


@pytest.mark.parametrize(("model", "layout"), CAST_ONCE, ids=str)
def test_a_layout_that_casts_once_is_one_process(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    case = Case(model, layout, length(model), precision=replace(RECIPES["fp64"], fp8=RECIPE["tensorwise"]))
    told = pool.run(held, case, {})
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


@pytest.mark.parametrize(("model", "layout"), CAST_ONCE, ids=str)
def test_what_is_cast_once_is_priced_without_a_walk(model: ModelSpec, layout: Layout) -> None:
    for layers in (3, 4):
        deep = replace(model, layers=layers) if layers % layout.pp == 0 else model
        same_price(deep, layout, replace(RECIPES["bf16"], fp8=RECIPE["tensorwise"]))


@draws(2, wide=20)
@given(cast_once_cases())
def test_any_layout_that_casts_once_is_one_process(pool: Pool, case: Case) -> None:
    lay = case.layout
    assume(not case.schedule and lay.world <= 4)
    assume(not case.model.latent or lay.cp == 1)  # of keys made by several ranks, each casts its part of the gradients
    fuse = tuple(name for name in lay.fuse if name != "qkv" or lay.cp == 1)
    layout = replace(lay, fuse=fuse, elementwise="reference")
    assert isinstance(case.precision, Policy)
    policy = replace(RECIPES["fp64"], fp8=case.precision.fp8)
    told = pool.run(held, replace(case, layout=layout, precision=policy), {})
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, recompute=("*",), fuse=FUSIONS), Layout(tp=2, fuse=FUSIONS),
        Layout(cp=2, fuse=("mlp", "fp8")),
        Layout(pp=3, gradient_accumulation_steps=3, schedule="zb_h1", fuse=FUSIONS),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_that_samples_rows_is_one_process(pool: Pool, layout: Layout) -> None:
    case = Case(DENSE, layout, length(DENSE), precision=replace(RECIPES["fp64"], fp8=RECIPE["tensorwise"]))
    told = pool.run(held_by_some_rows, case)
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


def test_scales_from_some_rows_take_nothing_but_the_smallest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin of many octaves does."""
    case = Case(DENSE, Layout(fuse=FUSIONS), 64, precision=replace(RECIPES["fp64"], fp8=RECIPE["tensorwise"]))
    by_all = in_one_process(case)

    def furthest() -> float:
        by_some = in_one_process(case).gradients
        return max(((g - by_some[n]).abs().max() / g.abs().max()).item() for n, g in by_all.gradients.items())

    monkeypatch.setattr(sampled_rows, "LEAST_ROWS", 1)
    assert furthest() < 1e-7
    monkeypatch.setattr(fp8_linear, "MARGIN", 2.0**26)
    assert furthest() > 1e-3


def test_a_step_that_casts_once_is_the_step_that_casts_thrice_within_what_fp8_loses() -> None:
    """Of what is merged, scales are shared: other data, by half a step of each."""
    policy = replace(RECIPES["fp64"], fp8=RECIPE["tensorwise"])
    apart, bf16, *once = (
        in_one_process(Case(DENSE, Layout(fuse=fuse), 64, precision=p))
        for fuse, p in (((), policy), ((), RECIPES["fp64"]), (("fp8",), policy), (FUSIONS, policy))
    )
    for one in once:
        assert abs(one.loss / apart.loss - 1) < 1e-2
        for name, g in one.gradients.items():
            lost = ((apart.gradients[name] - bf16.gradients[name]).norm() / bf16.gradients[name].norm()).item()
            assert ((g - bf16.gradients[name]).norm() / bf16.gradients[name].norm()).item() < 1.3 * lost + 1e-2, name


@pytest.mark.parametrize("fuse", [("fp8",), ("norm", "mlp", "fp8"), ("add", "fp8"), FUSIONS], ids=str)
def test_what_a_norm_finds_is_what_a_pass_would_find(fuse: tuple[Fusion, ...]) -> None:
    """A step has the same bits; data of what norms made are cast without another look at it."""
    case = Case(DENSE, Layout(fuse=fuse, recompute=("rms_norm",)), 64, precision=RECIPES["fp8_tensorwise"])
    known, count = in_one_process(case), known_largest(case)
    with patch.object(casts._Casts, "_largest", lambda edit, x: edit.largest.get(x)):
        looked, fewer = in_one_process(case), known_largest(case)
    assert count - fewer == 2 * DENSE.layers
    assert torch.equal(known.loss, looked.loss)
    assert all(torch.equal(g, looked.gradients[name]) for name, g in known.gradients.items())


def known_largest(case: Case) -> int:
    """Casts of a forward that are told the largest value."""
    calls = (i.call for chunk in case.compile(0).chunks for i in chunk.actions["Fwd"])
    return sum(call.site.op_name == "quantise" and len(call.ins) > 1 for call in calls)


@pytest.mark.parametrize("layout", [Layout(fuse=FUSIONS), Layout(fuse=("fp8", "norm"), recompute=("*",))], ids=str)
def test_what_a_norms_backward_finds_is_what_a_pass_would_find(layout: Layout) -> None:
    """A step has the same bits; `o`, before the second norm of each layer, is told the largest of its gradients."""
    case = Case(DENSE, layout, 64, precision=RECIPES["fp8_tensorwise"])
    known, count = in_one_process(case), known_gradients(case)
    with patch.object(casts, "_hand_gradients_on", lambda tape: None):
        looked, fewer = in_one_process(case), known_gradients(case)
    assert (count, fewer) == (DENSE.layers, 0)
    assert torch.equal(known.loss, looked.loss)
    assert all(torch.equal(g, looked.gradients[name]) for name, g in known.gradients.items())


def known_gradients(case: Case) -> int:
    """Casts of gradients that are told the largest value: their calls read the scale of weights, a gradient, and it."""
    calls = (i.call for chunk in case.compile(0).chunks for i in chunk.actions["Bwd"])
    return sum(call.site.op_name == "fp8_linear" and len(call.ins) == 3 for call in calls
               if call.phase == "input_gradient")  # fmt: skip


@pytest.mark.parametrize("recompute", [("tp_all_gather",), ("tp_all_gather", "rms_norm")], ids=str)
def test_a_norm_finds_the_largest_of_what_tensor_ranks_gather(recompute: tuple[str, ...]) -> None:
    case = Case(DENSE, Layout(tp=2, fuse=FUSIONS, recompute=recompute), 64, precision=RECIPES["fp8_tensorwise"])
    assert known_largest(case) == 3 * DENSE.layers


def alone(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    """`held`, where every rank makes scales of what it has itself."""
    with patch.object(run_module, "all_reduce_max", lambda comm, p, axis, x: None):
        told = held(rank, groups, case, {})
    return [w for w in told if "wires" not in w]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_scales_of_another_group_are_seen(pool: Pool, name: str) -> None:
    policy = replace(RECIPES["fp64"], fp8=RECIPE[name])
    told = pool.run(alone, Case(DENSE, Layout(tp=2, cp=2), 64, precision=policy))
    assert any("is off by" in w for some in told for w in some)


@pytest.mark.parametrize(
    ("model", "layout", "fp8"),
    [*((model, layout, fp8) for model, layout in PLACES for fp8 in RECIPE.values()),
     *((model, replace(layout, zero=3), GATHERED) for model, layout in PLACES if layout.dp * layout.cp > 1)],
    ids=str,
)  # fmt: skip
def test_a_price_without_a_walk_is_that_of_the_walk(model: ModelSpec, layout: Layout, fp8: Fp8) -> None:
    same_price(replace(model, layers=4), layout, replace(RECIPES["bf16"], fp8=fp8))


def same_price(model: ModelSpec, layout: Layout, policy: Policy) -> None:
    """Of each stage, summed and walked."""
    composer, mesh = Composer(model, length(model), policy), Mesh(layout)
    for pp_rank in range(layout.pp):
        program = compile_step(model, layout, length(model), rank=mesh.group("pp", 0)[pp_rank], precision=policy)
        walked, summed = price(program), composer.rank(layout, pp_rank)
        assert summed.resident == walked.resident
        assert (summed.arena, summed.workspace) == (walked.arena, walked.workspace)
        assert summed.flops == +walked.flops
        check_sums(why(model, layout, length(model), policy, program.rank), program)
        wires = Counter[tuple[str, tuple[int, ...]]]()
        for (kind, axis), n in summed.redistributions.items():
            wires[kind, mesh.group(axis, program.rank)] += n
        assert +wires == +walked.redistributions

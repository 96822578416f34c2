"""Precision by module on layouts: every parameter has what the patterns say of it, in bytes too, and a layout with
patterns is one process with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from draws import draws
from layouts import CPU, Case
from parity.test_fp8 import DENSE as WIDE
from parity.test_fp8 import EXPERTS as WIDE_EXPERTS
from parity.test_fp8 import held as held_in_fp8
from parity.test_precision import DENSE, EXPERTS, held
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.fp8 import usual
from penteract.config.precision.policy import MOMENT_BLOCK, RECIPES, Policy
from penteract.engine.device.storages import bytes_of
from penteract.engine.dtypes import DTYPES
from penteract.engine.state.state import allocate
from penteract.readings.composed import Composer
from penteract.readings.estimator import Estimator
from penteract.readings.explain.why import why
from penteract.readings.price import price, resident
from penteract.step.program import compile_step
from pool import Pool
from precisions import BY_NAME, patterns
from readings.test_why import check_sums
from strategies import cases

NAMES = ["*", "embedding*", "layers.0.*", "*norm*", "layers.*.attention.o.weight", "*.weight"]
DRAWN = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["fp32", "bf16", "int8"])), min_size=1, max_size=3, unique=True
)
TRAINED = [
    (DENSE, Layout(dp=2, zero=2, gradient_accumulation_steps=2)),
    (EXPERTS, Layout(dp=4, ep=2, zero=3)),
]
IN_FP8 = [
    (WIDE, Layout(dp=2, tp=2, gradient_accumulation_steps=2, zero=3)),
    (WIDE_EXPERTS, Layout(dp=2, pp=3)),
]


def with_drawn(recipe: str, drawn: list[tuple[str, str]]) -> Policy:
    return replace(RECIPES[recipe], moments="int8", modules=patterns(*(f"{n}:moments={d}" for n, d in drawn)))


@settings(max_examples=15, deadline=None)
@given(case=cases(), recipe=st.sampled_from(["bf16", "bf16_pure", "fp32"]), drawn=DRAWN, of=st.integers(0, 7))
def test_moments_are_what_the_last_pattern_says_and_take_what_is_priced(
    case: Case, recipe: str, drawn: list[tuple[str, str]], of: int
) -> None:
    rank = of % case.layout.world
    p = compile_step(
        case.model, case.layout, case.sequence_length, rank=rank, precision=with_drawn(recipe, drawn),
        schedule=case.schedule,
    )  # fmt: skip
    state, seen = allocate(p, CPU), Counter[str]()
    for flat in state.flats:
        for q in flat.bucket.params:
            said = [dtype for names, dtype in drawn if fnmatchcase(q.name, names)]
            wanted = said[-1] if said else "int8"
            assert {t.dtype for t in flat.moments.values()} == {DTYPES[wanted]}, q.name
            scales = [len(t) * MOMENT_BLOCK for t in flat.scales.values()]  # whole blocks of them
            assert scales == [len(flat.master)] * len(flat.moments) * (wanted == "int8")
            seen[q.name] += 1
    assert seen == Counter(q.name for q in p.params)
    kept = resident(p)
    assert sum(kept.values()) - kept["data"] == bytes_of(state.resident())
    assert price(p).host == 0 or case.layout.offload or price(p).host == bytes_of(state.on_host())


@draws(4, wide=40)
@given(case=cases(), drawn=DRAWN)
@example(case=Case(replace(DENSE, layers=5), Layout(dp=2, pp=2, zero=3)), drawn=[("layers.0.*", "bf16")])
@example(case=Case(DENSE, Layout(dp=4, zero=1, offload_optimizer=True)), drawn=[("embedding*", "fp32")])
def test_a_price_without_a_walk_is_that_of_the_walk(case: Case, drawn: list[tuple[str, str]]) -> None:
    assume(not case.schedule)
    policy, mesh = with_drawn("bf16", drawn), Mesh(case.layout)
    composer = Composer(case.model, case.sequence_length, policy)
    estimate = Estimator(case.model, cluster("8xH200"), case.sequence_length, policy).estimate(case.layout)
    for pp_rank in range(case.layout.pp):
        rank = mesh.group("pp", 0)[pp_rank]
        walked = price(compile_step(case.model, case.layout, case.sequence_length, rank=rank, precision=policy))
        summed = composer.rank(case.layout, pp_rank)
        assert summed.resident == walked.resident
        assert (summed.arena, summed.workspace, summed.host) == (walked.arena, walked.workspace, walked.host)
        assert estimate.by_pp_rank[pp_rank] == summed.allocated


@pytest.mark.parametrize(("model", "layout"), IN_FP8, ids=str)
def test_a_price_of_linears_by_name_is_that_of_the_walk(model: ModelSpec, layout: Layout) -> None:
    deep, modules = replace(model, layers=6), patterns("*.o.weight:linears=bf16", "layers.2.*:linears=bf16")
    policy = replace(RECIPES["fp8_delayed"], modules=modules)
    composer, mesh = Composer(deep, 64, policy), Mesh(layout)
    for pp_rank in range(layout.pp):
        program = compile_step(deep, layout, 64, rank=mesh.group("pp", 0)[pp_rank], precision=policy)
        walked, summed = price(program), composer.rank(layout, pp_rank)
        assert summed.resident == walked.resident
        assert (summed.arena, summed.workspace) == (walked.arena, walked.workspace)
        assert summed.flops == +walked.flops
        check_sums(why(deep, layout, 64, policy, program.rank), program)


def in_fp8() -> Policy:
    """In float64 beside the data, so that a linear in another precision than in one process shows at once."""
    modules = patterns("*.attention.o.weight:linears=fp64", "layers.1.*:linears=fp64", "layers.1.*.q.*:linears=fp8")
    return replace(RECIPES["fp64"], fp8=usual("rowwise"), modules=modules)


@pytest.mark.parametrize(("model", "layout"), TRAINED, ids=str)
def test_a_layout_with_moments_by_name_is_one_process(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    told = pool.run(held, Case(model, layout, precision=BY_NAME))
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []


@pytest.mark.parametrize(("model", "layout"), IN_FP8, ids=str)
def test_a_layout_with_linears_by_name_is_one_process(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    told = pool.run(held_in_fp8, Case(model, layout, 64, precision=in_fp8()), {})
    assert [f"rank {r}: {w}" for r, some in enumerate(told) for w in some] == []

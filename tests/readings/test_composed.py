"""A price put together from layers is the price of the walk: the same bytes and FLOPs, on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.readings.composed import Composer
from penteract.readings.estimator import Estimator
from penteract.readings.price import price
from penteract.schedule.in_flight import _most, most_in_flight
from penteract.schedule.registry import SCHEDULES, schedule_of
from penteract.step.program import compile_step
from precisions import BY_NAME
from strategies import cases, cast_once_cases, fp8_gather_cases

NARROW = replace(RECIPES["bf16"], reduce="bf16", master="", stochastic=True, moments="int8")
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 3))]
PRECISIONS = [RECIPES["bf16"], RECIPES["fp64"], RECIPES["bf16_pure"], NARROW, BY_NAME]


@draws(20, wide=200)
@given(cases(), st.integers(0, 5), st.integers(1, 3), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS))
def test_equals_the_walk_of_every_rank(
    case: Case, deeper: int, longer: int, precision: Policy, optimizer_kinds: OptimizerKinds
) -> None:
    assume(not case.schedule)  # overlapped is a program's order, not a layout's
    model = replace(case.model, layers=case.model.layers + deeper)
    lay = replace(case.layout, gradient_accumulation_steps=case.layout.gradient_accumulation_steps * longer)
    check(model, lay, case.sequence_length, precision, optimizer_kinds)


@draws(6, wide=60)
@given(cast_once_cases(), st.integers(0, 3), st.sampled_from(OPTIMIZERS))
def test_equals_the_walk_where_operands_are_cast_once(case: Case, deeper: int, optimizer_kinds: OptimizerKinds) -> None:
    model = replace(case.model, layers=case.model.layers + deeper)
    check(model, case.layout, case.sequence_length, case.precision, optimizer_kinds)  # type: ignore[arg-type]


@draws(6, wide=60)
@given(fp8_gather_cases(), st.integers(0, 3), st.sampled_from(OPTIMIZERS))
def test_equals_the_walk_where_weights_are_gathered_in_fp8(
    case: Case, deeper: int, optimizer_kinds: OptimizerKinds
) -> None:
    assert isinstance(case.precision, Policy)
    model = replace(case.model, layers=case.model.layers + deeper)
    check(model, case.layout, case.sequence_length, case.precision, optimizer_kinds)
    assert case.precision.fp8
    plain = replace(case.precision, fp8=replace(case.precision.fp8, gather=False))
    in_fp8, whole = (
        Composer(model, case.sequence_length, p, optimizer_kinds).rank(case.layout, 0) for p in (case.precision, plain)
    )
    assert in_fp8.resident["ring_buffer"] < whole.resident["ring_buffer"]
    assert in_fp8.redistributions["all_reduce", "sequence"] <= whole.redistributions["all_reduce", "sequence"]
    if case.precision.compute == "bf16":
        prices = Estimator(model, cluster("8xH100"), case.sequence_length, case.precision, optimizer_kinds)
        ranks = (prices.composer.rank(case.layout, r) for r in range(case.layout.pp))
        assert prices.estimate(case.layout).by_pp_rank == tuple(rank.allocated for rank in ranks)


def check(
    model: ModelSpec, lay: Layout, sequence_length: int, precision: Policy, optimizer_kinds: OptimizerKinds
) -> None:
    """Of every rank of a stage's first place."""
    composer, mesh = Composer(model, sequence_length, precision, optimizer_kinds), Mesh(lay)
    for pp_rank in range(lay.pp):
        rank = mesh.group("pp", 0)[pp_rank]
        program = compile_step(
            model, lay, sequence_length, rank=rank, precision=precision, optimizer_kinds=optimizer_kinds
        )
        walked, summed = price(program), composer.rank(lay, pp_rank)
        assert summed.resident == walked.resident
        assert summed.arena == walked.arena
        assert summed.workspace == walked.workspace
        assert summed.host == walked.host
        assert summed.flops == +walked.flops
        assert walked.routed <= summed.routed
        assert walked.outside <= summed.routed + summed.workspace
        assert _on_wires(summed.redistributions, mesh, program.rank) == +walked.redistributions


def _on_wires(wires: dict[tuple[str, str], int], mesh: Mesh, rank: int) -> Counter[tuple[str, tuple[int, ...]]]:
    out = Counter[tuple[str, tuple[int, ...]]]()
    for (kind, axis), amount in wires.items():
        out[kind, mesh.group(axis, rank)] += amount
    return +out


@draws(15, wide=200)
@given(
    st.sampled_from(tuple(SCHEDULES)),
    st.integers(2, 6),
    st.integers(2, 3),
    st.integers(0, 40),
    st.data(),
)
def test_long_schedules_hold_what_short_ones_foretell(
    name: str, pp: int, vpp: int, more: int, data: st.DataObject
) -> None:
    schedule = schedule_of(name)
    vpp = min(vpp, schedule.max_vpp)
    micro_batches = schedule.steady_after(pp, vpp) + (1 + more) * schedule.round(pp)
    rank = data.draw(st.integers(0, pp - 1))
    ends = ["Inp", "Wgt"] if schedule.split_backward else ["Bwd"]
    spans = [("Fwd", end) for end in ends] + [("Inp", "Wgt")] * schedule.split_backward
    if rank:
        spans += [("Recv value", end) for end in ("Fwd", *ends)] + [(ends[0], "Send gradient")]
    if rank < pp - 1:
        spans += [("Recv gradient", end) for end in ends] + [("Fwd", "Send value")]
    for span in spans:
        members = tuple((c, span) for c in range(vpp))
        assert most_in_flight(name, pp, vpp, micro_batches, members) == _most(name, pp, vpp, micro_batches, members)

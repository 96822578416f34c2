"""Packs counted by kinds of layers are those that a rank fills one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.optimizers import OptimizerKinds
from penteract.config.precision.policy import Policy
from penteract.parallel.bucket_plans import BucketPlan
from penteract.readings.composed import Composer
from readings.test_composed import OPTIMIZERS, PRECISIONS
from strategies import cases, fp8_gather_cases


@draws(50, wide=750)
@given(cases(), st.integers(0, 40), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS), st.integers(0, 2**18))
def test_counts_are_those_of_packs_one_by_one(
    case: Case, deeper: int, precision: Policy, optimizer_kinds: OptimizerKinds, bucket_bytes: int
) -> None:
    case = replace(case, model=replace(case.model, layers=case.model.layers + deeper))
    for size in (case.layout.bucket_bytes, bucket_bytes):
        check(replace(case, layout=replace(case.layout, bucket_bytes=size)), precision, optimizer_kinds)


@draws(10, wide=125)
@given(fp8_gather_cases(), st.integers(0, 8), st.sampled_from(OPTIMIZERS))
def test_counts_are_those_of_packs_that_travel_in_fp8(case: Case, deeper: int, optimizer_kinds: OptimizerKinds) -> None:
    assert isinstance(case.precision, Policy)
    check(replace(case, model=replace(case.model, layers=case.model.layers + deeper)), case.precision, optimizer_kinds)


def check(case: Case, precision: Policy, optimizer_kinds: OptimizerKinds) -> None:
    """Of each stage; in the order in which a rank comes to the first of a kind."""
    lay = case.layout
    bucket_planner = Composer(case.model, case.sequence_length, precision, optimizer_kinds).bucket_planner
    for stage in range(lay.pp):
        one_by_one = Counter[tuple[object, ...]]()
        for plan in bucket_planner.bucket_plans(lay, stage):
            one_by_one[_kind(plan.at(stage))] += 1
        groups = bucket_planner.groups(lay)
        joined = next(runs for runs, ranks in zip(groups.joined, groups.ranks, strict=True) if stage in ranks)
        for runs in (bucket_planner.runs(lay, stage), joined):
            told = bucket_planner.counted(lay, runs, stage)
            assert [(_kind(plan.at(stage)), n) for plan, n in told] == list(one_by_one.items())


def _kind(plan: BucketPlan) -> tuple[object, ...]:
    return plan.kind

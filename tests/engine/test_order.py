"""A run does what its program says, in that order: calls, wires, waits, copies and the work beside them, any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from observed_calls import Seen, observation
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.fp8 import Fp8Scaling, usual
from penteract.config.precision.policy import RECIPES, Policy
from penteract.engine.executor.executor import Executor
from precisions import BY_NAME
from strategies import cases, cast_once_cases, fp8_gather_cases
from tiny import SIZES
from walked import expected

NARROW = replace(RECIPES["bf16"], reduce="bf16", master="", stochastic=True, moments="int8")
PRECISIONS = [RECIPES["fp64"], RECIPES["bf16"], RECIPES["fp16"], NARROW, BY_NAME]
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 2))]


def check(case: Case, rank: int, *, counted: bool = True) -> list[Seen]:
    p = case.compile(rank)
    seen, received = observation(p, counted=counted)
    told = expected(p, received, counted=counted)
    for i, (found, wanted) in enumerate(zip(seen, told, strict=False)):
        assert found == wanted, f"{case!r}, rank {rank}, {i}"
    assert len(seen) == len(told), f"{case!r}, rank {rank}"
    return seen


@draws(40, wide=600)
@given(cases(), st.integers(0, 7), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS), st.booleans())
def test_a_run_does_what_its_program_says(
    case: Case, of: int, precision: Policy, optimizer_kinds: OptimizerKinds, counted: bool
) -> None:
    if optimizer_kinds is not PLAIN:
        case = replace(case, layout=replace(case.layout, offload_optimizer=False))
    check(replace(case, precision=precision, optimizer_kinds=optimizer_kinds), of % case.layout.world, counted=counted)


@settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
@given(fp8_gather_cases(), st.integers(0, 7))
def test_and_where_weights_travel_in_fp8(case: Case, of: int) -> None:
    check(case, of % case.layout.world)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(cast_once_cases(), st.integers(0, 7))
def test_and_where_operands_are_cast_once(case: Case, of: int) -> None:
    check(replace(case, layout=replace(case.layout, elementwise="reference")), of % case.layout.world)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(fp8_gather_cases(), st.integers(0, 7), st.sampled_from(["tensorwise", "rowwise", "delayed"]))
def test_and_where_bodies_agree_on_scales(case: Case, of: int, kind: Fp8Scaling) -> None:
    assert isinstance(case.precision, Policy)
    check(replace(case, precision=replace(case.precision, fp8=usual(kind))), of % case.layout.world)


DENSE = ModelSpec(**SIZES)


def test_a_step_by_hand() -> None:
    """Two data ranks with ZeRO-1, one bucket of each kind: what is around the calls of a step."""
    case = Case(DENSE, Layout(dp=2, zero=1))
    seen = [s for s in check(case, 0) if s.what != "kernel"]
    whole, norms = (b.size * 8 for b in case.compile(0).buckets)
    start = Seen("start", ranks=(0, 1))
    scatter, gather = (start._replace(name=name) for name in ("reduce_scatter", "all_gather"))
    assert seen == [
        scatter._replace(bytes=norms, number=0), scatter._replace(bytes=whole, number=1),
        Seen("wait", number=0), Seen("wait", number=1), Seen("measure", bucket=0), Seen("measure", bucket=1),
        start._replace(name="all_reduce", bytes=(1 + 1 + 1 + 4) * 8, number=2), Seen("wait", number=2),
        Seen("update", bucket=1, bytes=norms // 2), gather._replace(bytes=norms, number=3),
        Seen("update", bucket=0, bytes=whole // 2), gather._replace(bytes=whole, number=4),
    ]  # fmt: skip
    first = check(case, 0, counted=False)
    assert first[:2] == [start._replace(name="all_reduce", bytes=8, number=0), Seen("wait", number=0)]
    assert len(first) == len(check(case, 0)) + 2


def late(run: Executor, bucket: int) -> None:
    """What was gathered is not waited for."""


def unbidden(run: Executor, bucket: int) -> None:
    """All that is on the wire is waited for, where one bucket is."""
    run.settle_parameters()


def twice(run: Executor, bucket: int) -> None:
    REAL["measure"](run, bucket)
    REAL["measure"](run, bucket)


REAL = {name: getattr(Executor, name) for name in ("wait_all_gather", "measure", "update")}


@pytest.mark.parametrize(
    ("question", "fault"),
    [("wait_all_gather", late), ("wait_all_gather", unbidden), ("measure", twice), ("update", late)],
)
def test_what_is_not_in_its_place_is_seen(question: str, fault: Callable[[Executor, int], None]) -> None:
    case = Case(replace(DENSE, layers=4), Layout(dp=2, zero=3))
    check(case, 0)
    with patch.object(Executor, question, fault), pytest.raises(AssertionError):
        check(case, 0)

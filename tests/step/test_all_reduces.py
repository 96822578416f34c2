"""What ranks agree on beside the calls of a step: each is asked for once, in its place, with the size that it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import CPU, Case
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.engine.comm.distributed import Gloo
from penteract.engine.executor.allocator import Fresh
from penteract.engine.executor.executor import Executor
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.state.state import allocate
from penteract.ops.tape import Call
from penteract.step.all_reduces import (
    BITS,
    DIGITS,
    StepAllReduce,
    after_backward,
    at_begin,
    digits,
    reports_targets,
    totals,
)
from penteract.step.program import BufferKey, Program, compile_step
from penteract.step.walk import Silent, walk, walk_forward
from strategies import cases
from tiny import SIZES

ROUTED = ModelSpec(**SIZES | {"hidden_size": 64, "ffn_size": 128, "head_size": 16},
                   moe=MoESpec(experts=4, top_k=2, ffn_size=32, balance="bias", dense_layers=(0,)))  # fmt: skip
DENSE = replace(ROUTED, moe=None)


class Asked(Silent):
    """Questions that are no call's, as they come, and calls as one op."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def all_reduce(self, reduction: StepAllReduce) -> None:
        self.said.append(f"{reduction.name} over {reduction.axis}")

    def call(self, buffer: BufferKey, call: Call) -> None:
        if self.said[-1:] != ["calls"]:
            self.said.append("calls")

    def scales(self) -> None:
        self.said.append("scales")

    def widen(self, bucket: int) -> None:
        self.said.append(f"widen {bucket}")

    def measure(self, bucket: int) -> None:
        self.said.append(f"measure {bucket}")

    def factors(self) -> None:
        self.said.append("factors")

    def update(self, bucket: int) -> None:
        self.said.append(f"update {bucket}")


def asked(p: Program) -> list[str]:
    reading = Asked()
    walk(p, reading)
    return reading.said


def test_a_step_by_hand() -> None:
    p = compile_step(ROUTED, Layout(dp=2, bucket_bytes=2**30), 32, precision="fp8_delayed")
    buckets = range(len(p.buckets))
    assert len(buckets) == 2  # what decays, and what does not
    order = [b for at in sorted(p.events) for question, b in p.events[at].after if question == "reduce"]
    assert sorted(order) == [*buckets]
    said = asked(p)
    assert said == [
        "scales", "calls", *(f"widen {b}" for b in order), "routed counts over dp_cp_tp",
        "largest values over dp_cp_tp", *(f"measure {b}" for b in buckets), "gradient norm and losses over world",
        "factors",
        *(f"update {b}" for b in reversed(buckets)),
    ]  # fmt: skip
    first = Asked()
    walk(p, first, targets_counted=False)
    assert first.said == ["target tokens over dp", *said]
    second = compile_step(ROUTED, Layout(dp=2, bucket_bytes=2**30), 32, rank=1, precision="fp8_delayed")
    assert not [said for said in asked(second) if said.startswith("measure")], "the first replica counts"


def test_validation_counts_and_adds_its_losses_up() -> None:
    p = compile_step(DENSE, Layout(dp=2), 32, training=False)
    reading = Asked()
    walk_forward(p, reading)
    assert reading.said == ["target tokens over dp", "scales", "calls", "gradient norm and losses over world"]


def test_sums_are_waited_for_in_the_order_in_which_they_were_put_on_the_wire() -> None:
    """Replicas of a shard are summed when the next bucket is: a bucket's last sum is then under way after another's."""
    p = compile_step(DENSE, Layout(dp=4, zero=1, shard_group=2, bucket_bytes=2**14), 32)
    every = [e for at in sorted(p.events) for some in p.events[at] for e in some]
    order = [b for question, b in every if question == "replicate"]
    assert len(order) > 2
    assert [said for said in asked(p) if said.startswith("widen")] == [f"widen {b}" for b in order]


@pytest.mark.parametrize("precision", ["bf16", "fp64", "fp8_delayed", replace(RECIPES["fp8_tensorwise"], fp8=replace(
    RECIPES["fp8_tensorwise"].fp8, gather=True))], ids=str)  # type: ignore[type-var]  # fmt: skip
@pytest.mark.parametrize("model", [DENSE, ROUTED], ids=["dense", "routed"])
def test_they_are_of_the_size_of_the_tensors_that_are_summed(model: ModelSpec, precision: str) -> None:
    layout = Layout(dp=2, pp=2, zero=3, gradient_accumulation_steps=2)
    for rank in range(layout.world):
        p = compile_step(model, layout, 32, rank=rank, precision=precision)
        run = Executor(p, allocate(p, CPU), Gloo(rank), dict(REFERENCE), Fresh(p.precision, CPU))
        every = (*at_begin(p, targets_counted=False), *after_backward(p), totals(p))
        assert {a.name for a in every} == {name for name, x in run.step_all_reduces.items() if x.numel()}
        for a in every:
            x = run.step_all_reduces[a.name]
            assert (a.elements, a.width, a.size) == (x.numel(), x.element_size(), x.nbytes), a


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(0, 7))
def test_every_sum_on_the_wire_is_waited_for_once(case: Case, of: int) -> None:
    p = case.compile(of % case.layout.world)
    alone = {b for b, bucket in enumerate(p.buckets) if bucket.cut_gradients and len(bucket.replicate_ranks) == 1}
    widened = [int(said.split()[1]) for said in asked(p) if said.startswith("widen")]
    assert sorted(widened) == [b for b, bucket in enumerate(p.buckets) if bucket.summed and b not in alone]


@given(st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=40), st.integers(1, 400))
def test_counts_are_exact_in_fp32(counts: list[int], times: int) -> None:
    """Up to 16000 ranks, added one after the other."""
    total = torch.zeros(DIGITS)
    for n in counts * times:
        total += torch.tensor(digits(n), dtype=torch.float32)
    assert sum(int(d) << BITS * i for i, d in enumerate(total.tolist())) == sum(counts) * times


def test_sums_of_the_largest_digits_stay_integers_that_fp32_has() -> None:
    assert ((1 << BITS) - 1) * 2**14 < 2**24
    assert digits(2**40 - 1) == [2**BITS - 1] * DIGITS


def test_one_rank_of_each_data_rank_tells() -> None:
    layout = Layout(dp=3, tp=2, pp=2, gradient_accumulation_steps=2)
    telling = [r for r in range(layout.world) if reports_targets(Mesh(layout), r)]
    assert telling == [0, 2, 4]

"""The largest values of weights that the update finds: those of the weights, and no bit of training depends on how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.test_update import by_reference
from penteract.config.hardware import cluster
from penteract.config.layout import FUSIONS, Layout
from penteract.config.optimizers import OptimizerName
from penteract.config.precision.policy import RECIPES
from penteract.config.run import Optimizer
from penteract.engine import checkpoint
from penteract.engine.executor.cuda_graph import CapturedStep
from penteract.engine.executor.outcome import Outcome
from penteract.engine.kernels import registry
from penteract.engine.session import trainer
from penteract.engine.session.saved import after_load, load_state, state_slices
from penteract.engine.state import largest_weights
from penteract.engine.state.largest_weights import LargestWeights
from penteract.engine.state.set_parameters import fill
from penteract.ops import casts
from penteract.ops.declarations.quantised.fp8 import ONE_SCALE
from penteract.parallel.known_weights import TILE, found_by_pass
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.price import resident
from penteract.readings.time.cost import BucketCosts
from penteract.step import update as step_update
from penteract.step.program import compile_step
from precisions import SMALL, Small, differ, kept, patterns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small trainers are on the CPU")
MODEL = replace(SMALL, layers=2, hidden_size=32, heads=2, kv_heads=2, head_size=32, ffn_size=64, vocab_size=288)
ODD = replace(MODEL, hidden_size=16, head_size=16, ffn_size=48)  # tiles are of several weights
FP8 = RECIPES["fp8_tensorwise"]
POLICIES = {
    "split master weights": FP8,
    "whole master weights": replace(FP8, master="fp32"),
    "no master weights": replace(FP8, master="", stochastic=True),
    "moments in 8 bits": replace(FP8, moments="int8"),
    "moments in 8 bits, no master weights": replace(FP8, moments="int8", master="", stochastic=True),
}
APART = "moments of what shares a value are of two dtypes"
POLICIES_APART = {APART: replace(FP8, modules=patterns("*.attention.q.weight:moments=bf16"))}
LAYOUT = Layout(micro_batch_size=2, gradient_accumulation_steps=2, elementwise="triton", fuse=FUSIONS)


def small(
    what: str = "split master weights", *, kind: OptimizerName = "adamw", by_update: bool = True, **about: Any
) -> Small:
    """A trainer whose update is by Triton, and all else by plain torch. Unless `by_update`, each cast looks for the
    largest value of its weights."""
    layout = replace(LAYOUT, **{k: v for k, v in about.items() if k != "model"})
    with (
        patch.object(trainer, "check_kernels"), patch.object(registry, "kernel", by_reference),
        patch.object(casts, "largest_by_update", lambda layout: by_update and layout.updates_whole),
    ):  # fmt: skip
        return Small(
            (POLICIES | POLICIES_APART)[what], model=about.get("model", MODEL), steps=4, layout=layout,
            optimizer=Optimizer(learning_rate=3e-2, kind=kind),
        )  # fmt: skip


def values(run: Small) -> LargestWeights:
    """Those that a step has left, which are those of the weights."""
    found = run.state.largest_weights
    assert found is not None and len(found.values) == 4 * MODEL.layers
    for name, value in found.values.items():
        shared = [x for other, x in found.weights.items() if found.first[other] == name]
        assert value.item() == max(x.abs().max().item() for x in shared) > 0
    return found


def passes(run: Small, step: Callable[[], Outcome]) -> int:
    """How many weights a step passes over to find their largest value."""
    with patch.object(largest_weights, "put_largest", wraps=largest_weights.put_largest) as put:
        step()
    return put.call_count


@pytest.mark.parametrize("what", POLICIES)
def test_a_kernel_finds_them_and_no_bit_differs(what: str) -> None:
    run, other = small(what), small(what, by_update=False)
    assert other.state.largest_weights is None
    before = list[float]()
    for n in (1, 2):
        seen = passes(run, lambda n=n: run.step(n))
        assert seen == (7 * MODEL.layers if n == 1 else 0)
        other.step(n)
        assert not differ(kept(run.state), kept(other.state))
        now = [x.item() for x in values(run).values.values()]
        assert before != now
        before = now


@pytest.mark.parametrize(
    ("about", "seen"),
    [({"model": ODD}, 7 * ODD.layers), ({"kind": "muon"}, 7 * MODEL.layers), ({"what": APART}, 7 * MODEL.layers)],
    ids=["tiles of several weights", "matrices that Muon moves", APART],
)
def test_what_a_kernel_cannot_find_a_pass_does(about: dict[str, Any], seen: int) -> None:
    run, other = small(**about), small(**about, by_update=False)
    run.step(1)
    assert passes(run, lambda: run.step(2)) == seen
    assert not values(run).rows
    for n in (1, 2):
        other.step(n)
    assert not differ(kept(run.state), kept(other.state))


@pytest.mark.parametrize(
    "about",
    [{}, {"model": ODD}, {"kind": "muon"}, {"what": APART}, {"what": APART, "bucket_bytes": 4096},
     {"bucket_bytes": 4096, "kind": "muon"}, {"fuse": ()}, {"fuse": (), "kind": "muon"},
     {"zero": 2, "model": ODD}],
    ids=str,
)  # fmt: skip
def test_a_pass_is_in_the_price_where_one_runs(about: dict[str, Any]) -> None:
    """By bucket, and in the buckets that are counted without packing each layer."""
    run, read = small(**about), 0
    run.step(1)

    def note(x: torch.Tensor, largest: torch.Tensor) -> None:
        nonlocal read
        read += x.numel()

    p = run.trainer.program
    with patch.object(largest_weights, "put_largest", note):
        run.step(2)
    assert read == sum(found_by_pass(b.known_weights, b.optimizer_kind) for b in p.buckets)
    assert (read > 0) == (bool(about) and "fuse" not in about)
    composer = Composer(p.model, p.sequence_length, p.precision, run.trainer.spec.optimizer.optimizer_kinds)
    planner = composer.bucket_planner
    counted = planner.counted(p.layout, planner.runs(p.layout, 0), 0)
    told = [(planner.bucket(p.layout, plan, 0), n) for plan, n in counted]
    assert read == sum(n * found_by_pass(b.known_weights, b.optimizer_kind) for b, n in told)
    costs = BucketCosts(Rates.of(cluster("8xH100"), "bf16"), p.precision, 8)
    for b in p.buckets:
        passed = costs.update(b) - costs.update(replace(b, known_weights=()))
        assert (passed > 0) == (found_by_pass(b.known_weights, b.optimizer_kind) > 0)


def test_what_lies_on_the_host_is_found_slice_by_slice() -> None:
    here = small("moments in 8 bits")
    with patch.object(step_update, "SLICE", TILE):
        there = small("moments in 8 bits", offload_optimizer=True)
        for n in (1, 2):
            here.step(n)
            there.step(n)
    assert there.trainer.run.streamed is not None
    assert torch.equal(values(here).table[:, 0], values(there).table[:, 0])
    assert not differ(kept(here.state), kept(there.state))


def test_a_step_that_moves_nothing_leaves_them() -> None:
    run = small()
    run.step(1)
    before = values(run).table.clone()
    run.trainer.run.latch.fill_(torch.nan)
    run.step(2)
    assert torch.equal(values(run).table, before)


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    """Also where other weights were there before those of the checkpoint."""
    run, again = small(), small()
    for n in (1, 2):
        run.step(n)
    state = state_slices(run.trainer.program, run.state)
    checkpoint.save(tmp_path, 2, state, {"step": 2}, rank=0, world=1, barrier=lambda: None, epoch=0)
    again.step(1)
    load_state(checkpoint.latest(tmp_path), again.trainer.program, again.state)
    after_load(again.trainer.run)
    for n in (3, 4):
        assert run.step(n) == again.step(n)
        assert torch.equal(values(run).table, values(again).table)
    assert not differ(kept(run.state), kept(again.state))


def test_a_captured_step_casts_loaded_weights_by_their_own_values() -> None:
    run = small()
    run.step(1)

    class Device:
        def capture(self, walk: Callable[[], None]) -> Callable[[], None]:
            return lambda: None  # what the graph holds is not asked here: what is there before it is

    run.trainer.run.device = Device()  # type: ignore[assignment]
    captured = CapturedStep(run.trainer.run)
    captured.capture()
    fill(run.state, [(q, torch.full(q.shape, 0.75)) for q in run.trainer.program.params])
    captured.replay()
    assert {x.item() for x in values(run).values.values()} == {0.75}


def test_weights_are_validated_by_their_own_values() -> None:
    run, other = small(), small(by_update=False)
    assert run.trainer.validate(run.samples) == other.trainer.validate(other.samples)  # before the first step
    run.step(1), other.step(1)
    assert run.trainer.validate(run.samples) == other.trainer.validate(other.samples)


@pytest.mark.parametrize(
    ("layout", "by_update"),
    [({"dp": 2}, True), ({"dp": 2, "zero": 1}, False), ({"zero": 1}, True), ({"tp": 2, "dp": 2}, True),
     ({"elementwise": "reference"}, False)],
)  # fmt: skip
def test_a_rank_that_updates_whole_weights_keeps_them(layout: dict[str, Any], by_update: bool) -> None:
    p = compile_step(MODEL, replace(LAYOUT, **layout), 64, precision=FP8)
    assert len(p.known_weights) == 4 * MODEL.layers * by_update
    plain = compile_step(MODEL, replace(LAYOUT, **layout, fuse=()), 64, precision=FP8)
    casts = 4 * 3 * MODEL.layers  # each has a place for its largest value
    assert resident(p)["data"] - resident(plain)["data"] == ONE_SCALE * (len(p.known_weights) + casts)
    assert not (p.delayed_scaling or p.quantised_weights)

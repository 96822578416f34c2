"""Simpler layouts bound those with more tensor and context parallelism, and those with a backward in two actions."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.planner.plan import estimator
from penteract.planner.question import question
from penteract.planner.space.layouts import Space
from penteract.readings.estimator import Estimator
from penteract.readings.time.lower_bounds.bounds import Bounds
from penteract.readings.time.lower_bounds.simpler import simpler_meshes, with_whole_backward
from strategies import cases

CLUSTERS = ("8xH100", "2x8xH200", "8xB200", "2x8xA100", "3x8xH100")


def own(bounds: Bounds, layout: Layout, largest: int) -> float:
    """The rough bound by the layout's own passes, in its own mesh and schedule."""
    quick = bounds.quickest(layout, largest)
    return max(bounds._ends(layout, quick, layout.micro_batch_size / largest))


def check(bounds: Bounds, layout: Layout, largest: int) -> int:
    """No simpler mesh, nor a whole backward, has a higher bound. Returns how many were compared."""
    meshes, most = simpler_meshes(layout.tp, layout.cp, layout.ep, layout.expert_tp), own(bounds, layout, largest)
    assert meshes[-1] == (layout.tp, layout.cp)
    for mesh in meshes:
        assert 0 < bounds.roughest(layout, largest, mesh) <= most * (1 + 1e-9), (mesh, layout)
    return len(meshes)


@draws(20, wide=250)
@given(cases(), st.sampled_from(CLUSTERS), st.sampled_from([1, 8, 64]), st.sampled_from([1, 16, 256]))
def test_simpler_layouts_take_no_longer(case: Case, gpus: str, larger: int, longer: int) -> None:
    """Of tiny models, where launches and latencies take most of the time."""
    lay = case.layout
    meshes = simpler_meshes(lay.tp, lay.cp, lay.ep, lay.expert_tp)
    assume(case.schedule is None and (len(meshes) > 1 or with_whole_backward(lay) is not lay))
    check(
        Estimator(case.model, cluster(gpus), longer * case.sequence_length).bounds, lay, larger * lay.micro_batch_size
    )


@pytest.mark.parametrize(
    ("model", "gpus", "precision"),
    [
        ("llama-3.1-8b", "2x8xH200", "bf16"), ("llama-3.1-405b", "16x8xH100", "fp8_tensorwise"),
        ("gpt2", "8xA100", "bf16"), ("qwen3-30b-a3b", "8xH100", "fp8_blockwise"), ("deepseek-v3", "4x8xH100", "bf16"),
    ],
)  # fmt: skip
def test_families_of_questions_wait_with_no_more_than_their_own_bound(model: str, gpus: str, precision: str) -> None:
    ask = question(
        model, gpus, sequence_length=None, batch="96seqs", precision=precision, tp_across_nodes=model == "llama-3.1-8b"
    )
    bounds, random = estimator(ask).bounds, Random(7)
    every = [family for family in Space(ask).families(Counter()) if family.rest["pp"] <= 4]
    checked = 0
    for family in random.sample(every, 60):
        memory, sizes = random.choice(family.members)
        checked += check(bounds, family.layout(memory, *sizes[0]), ask.global_batch_size)
    assert checked > 60

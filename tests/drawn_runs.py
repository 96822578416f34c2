"""Runs on eight ranks, drawn by a seed: each of other degrees than those before it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from penteract.config.run import Optimizer, Precision, RunSpec, Training
from strategies import cases

RANKS = 8
RECIPES = ("fp32", "bf16", "bf16_pure", "fp64")
DRAWS = 120  # of which those are taken that are unlike


@st.composite
def runs(draw: DrawFn) -> RunSpec:
    """A run on all eight ranks."""
    case = draw(cases(max_ranks=RANKS).filter(lambda c: c.layout.world == RANKS and c.schedule is None))
    lay, recipe = case.layout, draw(st.sampled_from(RECIPES))
    kind = draw(st.sampled_from(["adamw", "adamw", "muon"]))
    return RunSpec(
        model=case.model, layout=replace(lay, offload_optimizer=lay.offload_optimizer and kind == "adamw"),
        sequence_length=case.sequence_length, precision=Precision(dtype=recipe, device="cpu"),
        optimizer=Optimizer(kind=kind), train=Training(steps=2, validation_every=0),
    )  # fmt: skip


@cache
def drawn(count: int) -> list[RunSpec]:
    """So many runs, the same every time."""
    found = dict[tuple[object, ...], RunSpec]()

    @settings(max_examples=DRAWS, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(runs())
    def draw(spec: RunSpec) -> None:
        lay = spec.layout
        found.setdefault((lay.dp, lay.tp, lay.pp, lay.cp, spec.model.moe is None), spec)

    draw()
    return list(found.values())[1 : count + 1]

"""A long schedule takes as long as playing it in full, and no bound exceeds that, however uneven its stages are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.estimate.pipeline import _ends, critical_path, least
from penteract.spec.layout import Layout

SECONDS = st.floats(0.5, 4.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Layout, list[Any], float]:
    name = draw(st.sampled_from(["1f1b", "afab", "zb_h1", "interleaved"]))
    pp, vpp = draw(st.integers(2, 5)), draw(st.integers(2, 3)) if name == "interleaved" else 1
    micros = pp * draw(st.integers(1, 20)) if name == "interleaved" else draw(st.integers(1, 90))
    kinds = ("Fwd", "Inp", "Wgt") if name == "zb_h1" else ("Fwd", "Bwd")
    ranks = [tuple({kind: draw(SECONDS) for kind in kinds} for _ in range(vpp)) for _ in range(pp)]
    layout = Layout(pp=pp, vpp=vpp, schedule=name, gradient_accumulation_steps=micros)
    return layout, ranks, draw(st.sampled_from([0.0, 0.02]))


@settings(max_examples=50)
@given(pipelines())
def test_a_long_schedule_takes_what_playing_it_takes(case: tuple[Layout, list[Any], float]) -> None:
    layout, ranks, wire = case
    told = critical_path(layout, ranks, wire)
    assert told == pytest.approx(_ends(layout, ranks, wire, layout.gradient_accumulation_steps), rel=1e-6)
    for own, way in least(layout.gradient_accumulation_steps, ranks, range(layout.pp), wire):
        assert max(own, way) <= max(told) * (1 + 1e-9)


def test_stages_that_settle_late_are_played_until_they_have() -> None:
    times = ((1.87, 3.69), (1.22, 2.40), (1.22, 2.64), (1.71, 3.56))
    ranks = [({"Fwd": f, "Bwd": b},) for f, b in times]
    layout = Layout(pp=4, gradient_accumulation_steps=112)
    assert max(critical_path(layout, ranks, 0.02)) == pytest.approx(max(_ends(layout, ranks, 0.02, 112)))

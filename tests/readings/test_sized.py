"""A tape whose micro-batch size was left open is, at each size, what is recorded with that size."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from layouts import Case
from penteract.config.mesh import Mesh
from penteract.model.decoder import record
from penteract.readings.layers.outline import signature, sites_of
from penteract.readings.layers.sized import OPEN, sized
from strategies import cases


@given(cases(), st.integers(1, 12))
def test_is_what_is_recorded_with_the_size(case: Case, size: int) -> None:
    # How many chunks a loss has hangs on the size: it is recorded for each.
    lay, length = replace(case.layout, micro_batch_size=size, loss="reference"), case.sequence_length
    for stage in range(lay.stages):
        open_ = record(case.model, Mesh(replace(lay, micro_batch_size=OPEN)), stage, length)
        told = record(case.model, Mesh(lay), stage, length)
        found, sites = sized(open_.tape, sites_of(open_.tape), size), sites_of(told.tape)
        assert signature(open_.tape) == signature(told.tape)
        assert open_.params == told.params
        assert list(found.specs) == told.tape.specs
        assert found.inputs == {name: told.tape.specs[v] for name, v in told.tape.inputs.items()}
        assert found.exit == (None if told.tape.exit is None else told.tape.specs[told.tape.exit])
        for one, other in zip(found.sites, sites, strict=True):
            assert (one.op_name, one.ins, one.outs, one.weights) == (
                other.op_name,
                other.ins,
                other.outs,
                other.weights,
            )
            assert (one.params, one.attrs, one.layer) == (other.params, other.attrs, other.layer)

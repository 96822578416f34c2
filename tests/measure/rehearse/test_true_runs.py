"""A rehearsal is the run: on eight ranks of gloo, every call on a wire and every byte, for drawn layouts.

`make test-all` tries twelve (`tests/rehearsed_long.py`, which writes a record).
"""

from __future__ import annotations

import pytest

from drawn_runs import drawn
from measure.rehearse.true_run import differences
from penteract.config.layout import EP_METHODS, EpMethod, Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.run import Precision, RunSpec, Training
from pool import Pool
from tiny import SIZES


def check(pool: Pool, spec: RunSpec) -> None:
    found = pool.run(differences, spec)
    wrong = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
    assert not wrong, "\n".join([repr(spec.layout), *wrong])


@pytest.mark.parametrize("method", EP_METHODS)
def test_a_rehearsal_is_the_run_with_padded_rows(pool: Pool, method: EpMethod) -> None:
    """Whose routing it need not be given: no byte depends on it."""
    layout = Layout(dp=2, tp=2, ep=2, ep_method=method, expert_rows="padded", experts="grouped", zero=1)
    model = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=16))
    check(pool, RunSpec(model=model, layout=layout, sequence_length=16, precision=Precision(dtype="fp32", device="cpu"),
                        train=Training(steps=2, validation_every=0)))  # fmt: skip


def test_a_rehearsal_is_the_run(pool: Pool) -> None:
    """The first drawn layout of several stages, shards and experts."""
    check(pool, drawn(2)[1])

"""A rehearsal is the run: on eight ranks of gloo, every call on a wire and every byte, for drawn layouts.

`make test-all` tries twelve (`tests/rehearsed_long.py`, which writes a record).
"""

from __future__ import annotations

from drawn_runs import drawn
from measure.rehearse.true_run import differences
from penteract.config.run import RunSpec
from pool import Pool


def check(pool: Pool, spec: RunSpec) -> None:
    found = pool.run(differences, spec)
    wrong = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
    assert not wrong, "\n".join([repr(spec.layout), *wrong])


def test_a_rehearsal_is_the_run(pool: Pool) -> None:
    """The first drawn layout of several stages, shards and experts."""
    check(pool, drawn(2)[1])

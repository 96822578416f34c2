"""Products of tensor parallelism in two parts beside their collectives: the step of one process, and its price."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given

from draws import draws
from layouts import Case, run_case, run_directly
from pool import Pool
from strategies import cases


def in_parts(case: Case) -> Case:
    assume(case.layout.tp > 1)
    return replace(case, layout=replace(case.layout, collectives="overlapped"))


@draws(2, wide=40)
@given(case=cases(max_ranks=4).map(in_parts))
def test_they_are_the_step_of_one_process_and_its_price(pool: Pool, case: Case) -> None:
    found = pool.run(run_case, case)
    assert not [f"rank {rank}: {v}" for rank, v in enumerate(found) if v.red], case
    direct = pool.run(run_directly, case)
    assert not [f"rank {rank}: {v}" for rank, (v, _) in enumerate(direct) if v.red], case

"""Every layout takes the same step as one process, and takes what its price says: any layout, drawn."""

from __future__ import annotations

from hypothesis import given

from draws import draws
from layouts import Case, run_case
from pool import Pool
from strategies import cases


def check(pool: Pool, case: Case) -> None:
    verdicts = pool.run(run_case, case)
    red = [f"rank {rank}: {v}" for rank, v in enumerate(verdicts) if v.red]
    assert not red, "\n".join([repr(case), *red])


@draws(4, wide=80)
@given(case=cases(max_ranks=8))
def test_a_layout_is_one_process_and_its_price(pool: Pool, case: Case) -> None:
    check(pool, case)

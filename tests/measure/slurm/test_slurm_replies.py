"""What Slurm answers is read, however odd it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from measure.slurm.slurm_replies import SACCT, SQUEUE
from penteract.slurm.answers import Answer, parse_sacct, parse_squeue


def test_squeue_is_read() -> None:
    assert parse_squeue(SQUEUE) == {
        "12_0": Answer(state="RUNNING", seconds=65, about="RUNNING on n[1-2]"),
        "12_1": Answer(state="PENDING", seconds=0, about="PENDING: Resources"),
        "13": Answer(state="COMPLETING", seconds=93_600, about="COMPLETING on n1"),
        "12_2": Answer(state="NODE_FAIL", seconds=9, about="NODE_FAIL on n2"),
        "14": Answer(state="RUNNING", about="RUNNING on n1"),
    }


def test_sacct_is_read() -> None:
    assert parse_sacct(SACCT) == {
        "12_3": Answer(state="OUT_OF_MEMORY", exit_code=1, seconds=40, about="OUT_OF_MEMORY on n1"),
        "12_4": Answer(state="CANCELLED", exit_code=137, seconds=3, about="CANCELLED on n2"),
        "12_5": Answer(state="COMPLETED", exit_code=0, seconds=60, about="COMPLETED on n[1-2]"),
        "12_6": Answer(state="PENDING", exit_code=0, seconds=0, about="PENDING"),
    }


@given(st.text(alphabet="12_|:-.\n RUNNINGPED", max_size=80))
def test_no_answer_is_too_odd(text: str) -> None:
    parse_squeue(text)
    parse_sacct(text)

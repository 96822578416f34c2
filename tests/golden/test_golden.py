"""Every number that a plan publishes is in a file of this folder, so that a change of it shows as a diff.

layouts/ has one layout a file: memory by kind and by pipeline rank, the step and its parts, rates. plans/ has the five
best of a question, and how many layouts were refused for which reason. Bytes, counts and ops must be equal; seconds
and rates to a relative 1e-6.

A change that is meant is written with `python tests/golden/write.py`, which prints it; the commit that has a changed
golden file gives the reason. Whether the numbers are right is not asked here but in test_by_hand.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.questions import Question
from golden.record import HERE, difference, paths, record, settled


@pytest.mark.parametrize(("path", "question"), paths().items(), ids=[f"{p.parent.name}/{p.stem}" for p in paths()])
def test_answers_are_those_of_the_files(path: Path, question: Question) -> None:
    if change := difference(path, record(question)):
        pytest.fail(
            f"{change}\nIf this is meant: python tests/golden/write.py, and say why in the commit", pytrace=False
        )


def test_every_file_has_its_question() -> None:
    assert {*HERE.glob("*/*.json")} == {*paths()}


def test_what_counts_as_a_change() -> None:
    """Seconds may move by a millionth, bytes and ops not at all, and nothing may come or go."""
    stored = {"seconds": 1.234567, "bytes": 10**9, "parts": [1.0, 2.0], "why": "a, 25 %"}
    near = {"seconds": 1.2345675, "bytes": 10**9, "parts": [1.0000009, 2.0], "why": "a, 25 %"}
    assert settled(stored, near) == stored
    for change in ({"seconds": 1.23457}, {"bytes": 10**9 + 1}, {"parts": [1.0]}, {"parts": [1.0, 2.1]}, {"why": "b"}):
        assert settled(stored, near | change) == stored | change
    assert settled(stored, {"seconds": 1.234567}) != stored
    assert settled(stored, stored | {"more": 0}) != stored

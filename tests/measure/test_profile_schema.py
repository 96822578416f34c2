"""The schema of `profile.json`: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Literal, NotRequired, TypedDict

import pytest

from penteract.errors import BadInput
from penteract.measure.schemas.profile_reader import read_profile
from penteract.measure.schemas.typed_json import mismatches


class _Row(TypedDict):
    number: int
    rate: float
    kind: Literal["a", "b"]
    names: list[str]
    sizes: dict[str, int]
    other: NotRequired[int | None]


GOOD: dict[str, object] = {"number": 1, "rate": 2, "kind": "a", "names": ["x"], "sizes": {"x": 1}}


def test_a_value_of_its_type_has_no_mismatch():
    assert not list(mismatches(GOOD, _Row))
    assert not list(mismatches({**GOOD, "other": None, "later": []}, _Row))


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"number": "1"}, "number: '1' is not int"),
        ({"number": True}, "number: True is not int"),
        ({"rate": None}, "rate: None is no number"),
        ({"kind": "c"}, "kind: 'c' is none of a, b"),
        ({"names": ["x", 2]}, "names[1]: 2 is not str"),
        ({"sizes": {"x": 1.5}}, "sizes.x: 1.5 is not int"),
        ({"sizes": []}, "sizes: [] is no object"),
        ({"other": "no"}, "other: 'no' is not int"),
    ],
)
def test_each_mismatch_is_named_by_its_place(changed: dict[str, object], where: str):
    assert list(mismatches({**GOOD, **changed}, _Row)) == [where]


def test_a_missing_key_is_named():
    assert list(mismatches({k: v for k, v in GOOD.items() if k != "rate"}, _Row)) == ["rate: missing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no profile"), ("{", "not JSON"), ("[]", "another version"), ('{"version": 99}', "another version"),
     ('{"version": 1}', "kind: missing")],
)  # fmt: skip
def test_what_is_no_profile_is_refused_with_its_reason(text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        read_profile(tmp_path)


FIXTURE = Path(__file__).parent / "profiles" / "tiny_tp2_pp2.json"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "profile.json")

    def write() -> None:
        """What a reader that waits gets, so that it does not wait for ever."""
        with suppress(OSError):
            (tmp_path / "profile.json").write_text("{}")

    Thread(target=write, daemon=True).start()
    with pytest.raises(BadInput, match="no profile"):
        read_profile(tmp_path)


def test_a_profile_of_a_run_is_of_its_schema_and_its_waterfall_adds_up():
    """`penteract profile --preset tiny`, one layer a stage, four ranks on a CPU."""
    found = read_profile(FIXTURE)
    rows, at = found["waterfall"], 0
    levels = [row["name"] for row in rows if row["level"]]
    for row in rows:
        at = row["picoseconds"] if row["name"] == "ideal" else at + (0 if row["level"] else row["picoseconds"])
        assert not row["level"] or row["picoseconds"] == at
    assert levels == ["ideal", "predicted", "measured"]
    assert at == found["step"]["measured"]
    assert all(sum(rank["parts"].values()) == rank["step"] for rank in found["ranks"])
    assert all(sum(m["owners"].values()) == m["peak"] for m in found["memory"])


def test_a_profile_of_a_gpu_sums_to_its_step_and_leaves_nothing_unmatched() -> None:
    """A record of an H100: the readers of CUPTI's events and of the allocator's history have seen a GPU."""
    profile = read_profile(Path(__file__).parents[2] / "benchmarks" / "results" / "profile_a1_h100.json")
    assert profile["made"]["device"].startswith("NVIDIA H100")
    assert profile["unmatched"]["measured_share"] < 0.01 and profile["unmatched"]["predicted_share"] < 0.01
    rows = profile["waterfall"]
    parts = sum(row["picoseconds"] for row in rows if not row["level"])
    assert rows[0]["picoseconds"] + parts == rows[-1]["picoseconds"] == profile["step"]["measured"]
    (memory,) = profile["memory"]
    assert sum(memory["owners"].values()) == memory["peak"] > 60 * 2**30

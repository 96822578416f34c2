"""The files of a sweep: they hold what was written, are replaced as a whole, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penteract.errors import BadInput, CorruptData, DiskFailure
from penteract.measure.schemas.sweep import (
    SCHEMA,
    CaseHandle,
    CaseMeasurement,
    CasePrediction,
    CaseProvenance,
    CaseResult,
    CaseStatus,
    SweepCase,
    SweepSettings,
)
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.measure.schemas.typed_json import from_json

CASE = SweepCase(
    name="001_tp2", number=1, origin="grid", varied={"parallel.tp": 2}, model="tiny", parameters=855_000,
    layout={"tp": 2, "recompute": "none", "reshard_after_step": False}, layout_text="tp=2", ranks=2,
    limit_s=60.0, precision="fp32", global_batch_size=4, sequence_length=32, model_flops=10, model_flops_causal=9,
    predicted=CasePrediction(allocated_bytes=100, usable_bytes=99, step_s=1),
)  # fmt: skip
RESULT = CaseResult(
    attempt=1,
    measured=CaseMeasurement(tokens_per_s_per_gpu=64, step_s=1.0, spread=0.01, steps_s=(1.0, 1.0), warmup_s=(2.0,),
                             losses=(3.0, None), loss_falls=False, void="the loss is not finite at step 2"),
    provenance=CaseProvenance(versions={"python": "3.11"}, commit="", device="cpu", hosts=("a",), began="", ended=""),
)  # fmt: skip
SETTINGS = SweepSettings(
    name="s", steps=10, warmup=2, limit_s=60, data="random", cluster="", command="", cases=("001_tp2",)
)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.case("001_tp2").make(CASE, "[parallel]\ntp = 2\n")
    sweep.write_settings(SETTINGS)
    return sweep


@pytest.mark.parametrize("name", ["..", "../../other", "a/b", "", "a\\b"])
def test_a_sweep_of_others_names_no_folder_elsewhere(folder: SweepFolder, name: str) -> None:
    folder.write_settings(replace(SETTINGS, cases=(name,)))
    with pytest.raises(CorruptData, match="not the name of a case"):
        folder.read()


def test_it_holds_what_was_written(folder: SweepFolder) -> None:
    case = folder.case("001_tp2")
    (row,) = folder.read().rows
    assert (row.case, row.status, row.result) == (CASE, CaseStatus(), None) and row.case.predicted.fits is False
    assert not folder.read().ended
    case.write_status(running := CaseStatus(state="running", attempt=1, losses=1))
    case.write_handle(1, handle := CaseHandle(launcher="local", handle="7", since="now"))
    assert (case.handle(1), case.handle(2)) == (handle, None)
    case.write_result(RESULT)
    assert case.row().result is None  # not before the status says so
    assert case.ends(done := replace(running, state="done", error={"code": "X", "exit_code": 2}))
    assert case.row().result == RESULT and case.row().status == done
    assert not case.row().counts and folder.read().ranked == []  # its loss is not finite
    assert folder.read().ended and folder.read().settings == SETTINGS
    assert not [*folder.path.rglob(".*")]


def test_a_case_that_was_lost_once_is_not_over() -> None:
    assert [CaseStatus(state="lost", losses=n).over for n in (1, 2)] == [False, True]
    assert CaseStatus(state="failed").over and not CaseStatus(state="running").over


def test_an_attempt_that_is_over_changes_nothing(folder: SweepFolder) -> None:
    case = folder.case("001_tp2")
    case.write_status(CaseStatus(state="running", attempt=2))
    assert not case.ends(CaseStatus(state="done", attempt=1)) and case.ends(CaseStatus(state="lost", attempt=2))
    assert not case.ends(CaseStatus(state="done", attempt=2)) and case.status().state == "lost"
    case.write_result(RESULT)  # of attempt 1
    case.write_status(CaseStatus(state="done", attempt=2))
    assert case.row().result is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "penteract.sweep/2"}',
                                  json.dumps({"schema": SCHEMA, "state": "well"}),
                                  json.dumps({"schema": SCHEMA, "attempt": True}), "[" * 100_000])  # fmt: skip
def test_damage_is_named(folder: SweepFolder, text: str) -> None:
    at = folder.case("001_tp2").path / "status.json"
    at.write_text(text)
    with pytest.raises(CorruptData, match=r"cannot read a file of the sweep · .*status\.json"):
        folder.read()


def test_what_is_missing_is_named(folder: SweepFolder, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not the folder of a sweep .* no sweep\.json"):
        SweepFolder(tmp_path).read()
    (folder.case("001_tp2").path / "case.json").unlink()
    with pytest.raises(CorruptData, match=r"is missing · .*case\.json"):
        folder.read()
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure, match=r"could not write .* the same command goes on"):
        SweepFolder(tmp_path / "file").write_settings(SETTINGS)


def test_keys_of_later_versions_are_left_out_and_numbers_are_exact() -> None:
    found = from_json(CasePrediction, {"allocated_bytes": 2**60 + 1, "step_s": 1, "new": []})
    assert found == CasePrediction(allocated_bytes=2**60 + 1, step_s=1.0) and isinstance(found.step_s, float)
    with pytest.raises(ValueError, match=r"predicted\.allocated_bytes: missing"):
        from_json(CasePrediction, {}, "predicted")
    with pytest.raises(ValueError, match=r"allocated_bytes: 1\.5 is not int"):
        from_json(CasePrediction, {"allocated_bytes": 1.5})


def test_a_sweep_that_was_recorded_is_read() -> None:
    """On two cores of a CPU, in the middle of its run: the shape of files is a contract with who reads them."""
    found = SweepFolder(Path(__file__).parent / "sweep_of_tiny").read()
    assert [row.case.number for row in found.rows] == [1, 2, 3, 4, 5, 6] and not found.ended
    first, last = found.rows[0], found.rows[-1]
    assert first.result is not None and first.counts and first.result.measured.loss_falls
    assert first.case.predicted.allocated_bytes == pytest.approx(max(first.result.measured.allocated_bytes), rel=5e-3)
    assert last.status.state == "skipped" and last.case.predicted.fits is False

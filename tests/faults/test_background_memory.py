"""A host without room for the snapshots of its ranks is named before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from faults.test_saved_state import session
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.run import RunPrediction
from penteract.engine.device import host_memory
from penteract.engine.rank.rank import Rank
from penteract.engine.runtime import start
from penteract.engine.session.background import opening
from penteract.errors import BadInput

ONE = Rank(0, 1, torch.device("cpu"), None)


def test_the_ranks_of_a_host_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["one", 60, 100], ["one", 41, 100], ["other", 60, 100], ["unknown", 10**12, None]]
    monkeypatch.setattr(Rank, "gather", lambda self, text: [json.dumps(row) for row in rows])
    with pytest.raises(BadInput, match="snapshots of 2 ranks do not fit") as failed:
        opening.refuse_too_large(ONE, 60)
    assert (failed.value.where, failed.value.exit_code) == ("one", 2)
    rows[1][1] = 40
    opening.refuse_too_large(ONE, 60)


@pytest.mark.parametrize("free", [300, 199, 99])
def test_copies_without_room_are_left_out_if_nobody_asked_for_them(
    free: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: free)
    predicted = RunPrediction(allocated_bytes=100, snapshot_bytes=100)
    words = ["precision.device=cpu", "training.steps=20", "checkpoint.every=5"]
    nobody, asked = resolve(None, "tiny", words), resolve(None, "tiny", [*words, "checkpoint.asynchronous=true"])
    if free < 100:
        for resolved in (nobody, asked):
            with pytest.raises(BadInput, match="do not fit this host's free memory"):
                start._with_room(resolved, predicted, quiet=False)
        return
    made = start._with_room(nobody, predicted, quiet=False)
    said = capsys.readouterr().out
    if free == 300:
        assert made is nobody and start._with_room(asked, predicted, quiet=False) is asked and not said
        return
    assert not made.run.checkpoint.asynchronous and said.startswith("Each save is waited for: copies of 100 B")
    assert "asynchronous = false" in to_toml(made)
    with pytest.raises(BadInput, match="copies of what they save do not fit"):
        start._with_room(asked, predicted, quiet=False)


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 10**6)
    words = ("--training.steps=4", "--checkpoint.asynchronous=true")
    with pytest.raises(BadInput, match="do not fit the memory"):
        session(tmp_path / "refused", *words)
    assert (
        session(tmp_path / "at once", "--training.steps=4", "--checkpoint.asynchronous=false").saver.background is None
    )
    assert session(tmp_path / "one save", *words, "--checkpoint.every=0").saver.background is None
    monkeypatch.setattr(host_memory, "available", lambda: 10**9)
    made = session(tmp_path / "fits", *words)
    assert made.saver.background is not None
    assert made.trainer.run.before_update is not None

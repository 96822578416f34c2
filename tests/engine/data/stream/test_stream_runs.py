"""Runs on a stream: a resumed one trains on what the whole one did, and reads nothing of what came long before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from faults.test_saved_state import session, weights
from listed_documents import ListedDocuments
from penteract.engine.data import open as opening
from penteract.engine.data import tokens
from penteract.engine.data.stream.stream_blocks import BLOCK
from penteract.engine.data.stream.stream_samples import StreamSamples
from penteract.engine.rank.rank import Rank
from penteract.engine.session import session as sessions
from penteract.errors import BadInput

WORDS = ("--data.source=hf:listed", "--batch.global_batch_size=100", "--batch.micro_batch_size=50")


def listed(
    monkeypatch: pytest.MonkeyPatch, text: str = "A document with the number {} of a stream."
) -> ListedDocuments:
    found = ListedDocuments(50_000, text.format)
    monkeypatch.setattr(opening, "HubDocuments", lambda corpus: found)
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 2000)
    return found


@pytest.mark.parametrize("stop", [4, 6])
def test_a_resumed_run_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    source = listed(monkeypatch)
    whole = session(tmp_path / "whole", "--training.steps=8", *WORDS)
    whole.go()
    session(tmp_path / "part", f"--training.steps={stop}", "--learning_rate.decay_end=8", *WORDS).go()
    source.opened.clear()
    resumed = session(tmp_path / "part", "--training.steps=8", *WORDS, resume=True)
    resumed.go()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    (trained,) = [at for at in source.opened if at]  # validation's documents are read from the first
    before = 100 * stop * 64
    assert trained > (before - 2 * BLOCK * 64) / 48


def test_another_stream_is_refused_where_it_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch)
    session(tmp_path, "--training.steps=6", *WORDS).go()
    listed(monkeypatch, "Another document: {} of a stream now.")
    with pytest.raises(BadInput, match="the data is not what the run was trained on"):
        session(tmp_path, "--training.steps=8", *WORDS, resume=True).go()


def test_ranks_of_a_host_share_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of this start alone, which goes with the run."""
    listed(monkeypatch)
    monkeypatch.setattr(Rank, "count_here", lambda _: 2)
    monkeypatch.setattr(sessions, "own_folder", lambda: tmp_path / "own")
    stored, stop = list[list[str]](), StreamSamples.close

    def noting(self: StreamSamples) -> None:
        stored.append(sorted(path.name for path in (tmp_path / "own" / "streams").rglob("*")))
        stop(self)

    monkeypatch.setattr(StreamSamples, "close", noting)
    for run in ("one", "two"):
        session(tmp_path / run, "--training.steps=2", *WORDS).go()
        assert "block-0" in stored[-1] and "lock" in stored[-1]
        assert not list((tmp_path / "own" / "streams").iterdir())
    folders = [{name for name in names if "-" not in name and name != "lock"} for names in stored]
    assert [len(names) for names in folders] == [1, 1] and folders[0] != folders[1]

"""What `penteract checkpoints` says: when each was saved, what is known of it, and of which run there are none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penteract.cli.checkpoints import _row
from penteract.engine import checkpoint
from penteract.engine.checkpoint import Slice, prove, save_alone


def test_a_checkpoint_that_is_proven_later_was_saved_when_its_manifest_was_written(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    os.utime(manifest, (1e9, 1e9))
    (tmp_path / "proven").touch()
    os.utime(tmp_path, (2e9, 2e9))
    one = SimpleNamespace(step=1, epoch=1, at=tmp_path, proven=True)
    assert _row(one, "not read").saved == "2001-09-09T01:46:40+00:00"
    manifest.unlink()  # of a damaged one
    os.utime(tmp_path, (2e9, 2e9))
    assert _row(one, "damaged").saved == "2033-05-18T03:33:20+00:00"


def test_a_run_without_checkpoints_is_named(tell: Callable[..., Any], tmp_path: Path) -> None:
    """`latest` may be one that has just begun."""
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.toml").touch()
    assert tell("checkpoints", "latest").out == "runs/a: no checkpoints yet\n"


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """The checkpoints of a run: steps 1 and 2, of which the first is proven."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "run.toml").touch()
    for step in (1, 2):
        weight = torch.full((64,), float(step))
        save_alone(run / "checkpoints", step, [[Slice("w", (64,), (0,), weight)]], {})
    prove(run / "checkpoints" / "step-00000001")
    return run / "checkpoints"


def test_what_was_not_read_is_called_so(tell: Callable[..., Any], steps: Path) -> None:
    file = steps / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    verified = tell("checkpoints", "runs/a", "--verify")
    assert verified.code == 65 and "proven" in verified.out
    assert "damaged: w" in " ".join(verified.out.split()) and "the checkpoint is damaged" not in verified.out
    listed = tell("checkpoints", "runs/a")
    assert listed.code == 0 and listed.out.count("not read") == 3 and "--verify reads every byte" in listed.out
    assert "intact" not in listed.out and "proven: it was read back when it was new" in listed.out
    rows = json.loads(tell("checkpoints", "runs/a", "--json").out)["checkpoints"]
    assert [(row["step"], row["proven"], row["state"]) for row in rows] == [
        (2, False, "not read"),
        (1, True, "not read"),
    ]


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_a_step_that_a_live_run_removes_is_left_out(
    tell: Callable[..., Any], steps: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    gone, check = steps / "step-00000001", checkpoint.check

    def check_late(at: Path) -> None:
        if at.name == gone.name:
            shutil.rmtree(gone)
        check(at)

    monkeypatch.setattr(checkpoint, "check", check_late)
    told = tell("checkpoints", "runs/a", *options)
    assert told.code == 0, told.err
    assert "runs/a/checkpoints/step-00000001: the run removed it meanwhile, left out\n" in told.out
    assert "proven" not in told.out

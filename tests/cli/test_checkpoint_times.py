"""What `penteract checkpoints` says: when each was saved, and of which run there are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penteract.cli.checkpoints import _row


def test_a_checkpoint_that_is_proven_later_was_saved_when_its_manifest_was_written(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    os.utime(manifest, (1e9, 1e9))
    (tmp_path / "proven").touch()
    os.utime(tmp_path, (2e9, 2e9))
    one = SimpleNamespace(step=1, epoch=1)
    assert _row(one, tmp_path, "proven").saved == "2001-09-09T01:46:40+00:00"
    manifest.unlink()  # of a damaged one
    os.utime(tmp_path, (2e9, 2e9))
    assert _row(one, tmp_path, "damaged").saved == "2033-05-18T03:33:20+00:00"


def test_a_run_without_checkpoints_is_named(tell: Callable[..., Any], tmp_path: Path) -> None:
    """`latest` may be one that has just begun."""
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.toml").touch()
    assert tell("checkpoints", "latest").out == "runs/a: no checkpoints yet\n"

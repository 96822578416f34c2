"""Where a training run starts: as ranks of its own on this host, or as a rank that torchrun made."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from penteract.engine import rundir
from penteract.engine.launch import launch
from penteract.spec.resolve import Resolved
from penteract.spec.write import to_toml


def train(
    resolved: Resolved,
    *,
    predicted: int = 0,
    compare: Path | None = None,
    resume: Path | None = None,
    json: bool = False,
    debug: bool = False,
) -> int:
    """Train; returns the exit code. `predicted`: bytes that rank 0 will allocate.

    Under a launcher this process is a rank; otherwise it starts as many as the layout has, one included: a rank's
    threads and their waiting are decided before torch is loaded.
    """
    words = [f"--predicted={predicted}", *["--json"] * json, *["--debug"] * debug]
    words += [f"--{name}={path}" for name, path in (("compare", compare), ("resume", resume)) if path is not None]
    if "RANK" in os.environ:
        worker = import_module("penteract.engine.worker")
        return worker.joined(lambda: _folder(resolved, resume), resolved.run, words)
    folder = _folder(resolved, resume)
    return launch(resolved.run.layout.world, ["-m", "penteract.engine.worker", str(folder), *words], folder, os.environ)


def _folder(resolved: Resolved, resume: Path | None) -> Path:
    """The run's folder: a new one, or the one that is resumed; its run.toml says how it now runs."""
    folder = resume or rundir.create(resolved.run.out, resolved.run.model.name)
    (folder / "run.toml").write_text(to_toml(resolved))
    (folder / "errors.jsonl").unlink(missing_ok=True)
    return folder

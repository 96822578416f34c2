"""Where a training run starts: alone in this process, as ranks of its own, or as a rank that torchrun made."""

from __future__ import annotations

import os
from pathlib import Path

from penteract.engine import rundir
from penteract.engine.launch import launch
from penteract.engine.rank import join
from penteract.engine.session import Orders
from penteract.engine.worker import work
from penteract.spec.resolve import Resolved
from penteract.spec.write import to_toml


def train(
    resolved: Resolved,
    *,
    compare: Path | None = None,
    resume: Path | None = None,
    json: bool = False,
    debug: bool = False,
) -> int:
    """Train; returns the exit code. Raises PenteractError for what goes wrong in this process."""
    spec = resolved.run
    if "RANK" in os.environ:
        rank = join(os.environ, spec.precision.device, spec.precision.dtype)
        folder = Path(rank.agree(str(_folder(resolved, resume)) if rank.number == 0 else ""))
        return work(spec, rank, Orders(folder, compare, resume, json))
    folder = _folder(resolved, resume)
    if spec.layout.world == 1:
        rank = join({}, spec.precision.device, spec.precision.dtype)
        return work(spec, rank, Orders(folder, compare, resume, json))
    asked = [(f"--{name}", path) for name, path in (("compare", compare), ("resume", resume)) if path is not None]
    words = [str(w) for pair in asked for w in pair] + ["--json"] * json + ["--debug"] * debug
    return launch(spec.layout.world, ["-m", "penteract.engine.worker", str(folder), *words], folder, os.environ)


def _folder(resolved: Resolved, resume: Path | None) -> Path:
    """The run's folder: a new one, or the one that is resumed; its run.toml says how it now runs."""
    folder = resume or rundir.create(resolved.run.out, resolved.run.model.name)
    (folder / "run.toml").write_text(to_toml(resolved))
    return folder

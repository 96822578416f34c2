"""What a run leaves, as tests and benchmarks compare it: its steps, digests of a checkpoint; and its processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from penteract.engine.checkpoint import manifest
from penteract.engine.session.outputs.metrics import read_metrics


def steps_of(run: Path) -> list[tuple[Any, ...]]:
    """Number, loss and gradient norm of each step of a run's folder."""
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows]


def digests(checkpoint: Path) -> dict[str, list[str]]:
    """By tensor, of each of its parts."""
    found = manifest.read(checkpoint).tensors.items()
    return {name: [part.digest for part in entry.parts] for name, entry in found}


def rows_so_far(run: Path) -> int:
    """Rows of a run that may be under way, or not begun."""
    with suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def children(pid: int) -> list[int]:
    """The processes that one has started, in their order; none if it has ended."""
    with suppress(OSError):
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
    return []

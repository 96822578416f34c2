"""What the planner says of a run that is to begin. `penteract train` imports it late: ranks import torch meanwhile."""

from __future__ import annotations

from penteract.cli.resolve.card_cluster import Card
from penteract.cli.resolve.gpu_defaults import Again, card_here, settle_defaults
from penteract.cli.resolve.predicted_run import predict_run
from penteract.config.resolve.resolved_run import Resolved
from penteract.measure.profile.out_of_memory import out_of_memory_line
from penteract.planner.settle_budget import settle_budget

__all__ = ["out_of_memory_line", "predict_run", "settled"]


def settled(
    resolved: Resolved, again: Again, *, launched: bool, resumed: bool
) -> tuple[Resolved, Card | None, list[str]]:
    """The run with all that was left open chosen for this host, whose GPUs are the second, and lines that say what was.
    `again`: resolves it with further settings."""
    card = card_here(resolved.run.precision.device, launched=launched)
    resolved, line = settle_defaults(resolved, card, again, resumed=resumed)
    resolved, chosen = settle_budget(resolved)
    return resolved, card, [line] * bool(line) + ([f"Recomputation {chosen.text()}"] if chosen else [])

"""What is checked and planned of a run that is to begin. `penteract train` imports it late: ranks import torch
meanwhile."""

from __future__ import annotations

from dataclasses import replace

from penteract.cli.resolve.card_cluster import Card
from penteract.cli.resolve.gpu_defaults import Again, card_here, settle_defaults
from penteract.cli.resolve.init_defaults import init_defaults, unlike_its_run
from penteract.cli.resolve.needed_gpus import check_gpus
from penteract.cli.resolve.planning.progress_line import terminal_width
from penteract.cli.resolve.predicted_run import predict_run
from penteract.cli.resolve.weights import Source
from penteract.config.resolve.resolved_run import Resolved
from penteract.measure.profile.out_of_memory import out_of_memory_line
from penteract.planner.report.as_text import wrapped
from penteract.planner.settle_budget import settle_budget
from penteract.step.program import check_op_names

__all__ = ["check_gpus", "check_op_names", "out_of_memory_line", "predict_run", "settled"]


def settled(
    resolved: Resolved, again: Again, *, launched: bool, resumed: bool, weights: Source | None = None
) -> tuple[Resolved, Card | None, list[str]]:
    """The run with all that was left open chosen for this host, whose GPUs are the second, and for the weights that it
    starts from, and lines that say what was. `again`: resolves it with further settings."""
    suited, lines = init_defaults(weights, resolved) if weights else ({}, [])
    words = [f"{key}={value}" for key, value in suited.items()]
    if words:
        resolved = again(words)
    card = card_here(resolved.run.precision.device, launched=launched)
    resolved, line = settle_defaults(resolved, card, lambda more: again([*words, *more]), resumed=resumed)
    resolved, chosen = settle_budget(resolved)
    if weights:
        why = f"chosen to go on from {weights.path}"
        resolved = replace(resolved, origins={**resolved.origins, **dict.fromkeys(suited, why)})
        lines += filter(None, [unlike_its_run(weights, resolved)])
    lines += [line] * bool(line) + ([f"Recomputation {chosen.text()}"] if chosen else [])
    return resolved, card, [wrapped(line, terminal_width()) for line in lines]

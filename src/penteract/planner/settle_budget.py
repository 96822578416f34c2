"""`memory.recompute = "budget"`: solved from cost estimates before the run reaches the engine, which has none.

The run file keeps both the budget and the choice, so the budget is solved again whenever a run starts or resumes.
"""

from __future__ import annotations

from dataclasses import replace

from penteract.config.resolve.resolved_run import Resolved
from penteract.planner.reference_node import reference_node
from penteract.readings.estimator import Estimator
from penteract.readings.recomputation.cheapest import Chosen, within


def settle_budget(resolved: Resolved) -> tuple[Resolved, Chosen | None]:
    """The run with its recomputation chosen, and the choice. Without a budget: the run unchanged, and None.

    The GPUs of the run are not known here, so FLOPs and traffic are priced as on the reference node.
    """
    run, budget = resolved.run, resolved.budget
    if budget is None:
        return resolved, None
    chosen = within(Estimator.of_run(run, reference_node(run.layout.world)), run.layout, budget)
    text = f"budget {budget.fraction:g}" if budget.fraction else f"budget {budget.allocated / 2**30:g} GiB"
    names = ("chosen", "recompute_every", "recompute_first", "recompute_else")
    origins = dict(resolved.origins) | {f"memory.{name}": f"derived: {text}" for name in names}
    return replace(resolved, run=replace(run, layout=chosen.layout), origins=origins), chosen

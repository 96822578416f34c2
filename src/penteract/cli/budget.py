"""`memory.recompute = "budget"`: solved with prices before the engine, which knows none, sees the run.

The run's file keeps both the budget and what was chosen, so it is solved anew whenever a run starts or goes on.
"""

from __future__ import annotations

from dataclasses import replace

from penteract.config.hardware import Cluster, reference
from penteract.config.rules.resolve import Resolved
from penteract.readings.estimator import Estimator
from penteract.readings.recomputation.cheapest import Chosen, within


def settle_budget(resolved: Resolved) -> tuple[Resolved, Chosen | None]:
    """The run with its recomputation chosen, and the choice; as it is where it asks for no budget.

    Which GPUs will run it is not known here: work and bytes moved weigh as on the reference node.
    """
    run, budget = resolved.run, resolved.budget
    if budget is None:
        return resolved, None
    known = reference()
    node = Cluster(name="reference", gpus=run.layout.world, gpu=known.gpu, inside=known.inside, curves=known)
    chosen = within(
        Estimator(
            run.model, node, run.sequence_length, run.precision.policy, optimizer_kinds=run.optimizer.optimizer_kinds
        ),
        run.layout,
        budget,
    )
    said = f"budget {budget.fraction:g}" if budget.fraction else f"budget {budget.allocated / 2**30:g} GiB"
    names = ("chosen", "recompute_every", "recompute_first", "recompute_else")
    origins = dict(resolved.origins) | {f"memory.{name}": f"derived: {said}" for name in names}
    return Resolved(run=replace(run, layout=chosen.layout), origins=origins, budget=budget), chosen

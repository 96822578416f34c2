"""The memory of a pipeline rank, row by row: each with its formula and the source line that allocates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penteract.config.mesh import Mesh
from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed

if TYPE_CHECKING:
    from penteract.readings.explain.terms import Why


def fullest_pp_rank(timed: Timed) -> int:
    """The pipeline coordinate of the rank with the most memory; the first of equal ones."""
    by_pp_rank = timed.estimate.by_pp_rank
    return max(range(len(by_pp_rank)), key=by_pp_rank.__getitem__)


def memory_by_line(plan: Plan, timed: Timed, pp_rank: int | None = None) -> Why:
    """All that the rank at pipeline coordinate `pp_rank` allocates, computes and sends; by default the fullest."""
    from penteract.readings.explain.why import why  # imported here: most plans do without it

    ask, lay, estimate = plan.ask, timed.layout, timed.estimate
    at = fullest_pp_rank(timed) if pp_rank is None else pp_rank
    priced = plan.search.estimators[estimate.precision].composer.rank(lay, at)
    rank = Mesh(lay).group("pp", 0)[at]
    rows = why(
        ask.model, lay, ask.sequence_length, estimate.precision, rank, optimizer_kinds=ask.optimizer_kinds,
        imbalance=ask.imbalance,
    )  # fmt: skip
    other = sum(priced.resident.get(kind, 0) for kind in ("data", "ring_buffer")) + priced.workspace
    return rows.whole(priced.arena + priced.routed, other)

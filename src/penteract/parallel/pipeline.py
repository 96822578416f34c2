"""Pipeline parallelism.

Split      layers, into pp·vpp stages; the schedule's placement assigns stages to ranks. The last stage has the head,
           and may have fewer layers for it (`last_stage_less_layers`).
Traffic    between stages: forward sends the residual stream, backward its gradient. The schedule decides when.
Costs      little traffic, idle time at both ends of a step, and activations of as many micro-batches as are in flight.
Helps      across slow links and for models that do not fit otherwise; hurts when micro-batches are few.
Papers     Narayanan 2021 (2104.04473) §2.2; Qi 2023 (2401.10241)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from penteract.config.layout import Layout
from penteract.schedule.schedule import Placement


def stage_layers(layers: int, layout: Layout) -> list[range]:
    """The layers of each stage. If they do not divide evenly, the first stages take one more: the last has the head."""
    lengths = _lengths(layers, layout.stages, layout.last_stage_less_layers)
    return [range(a, b) for a, b in pairwise(accumulate(lengths, initial=0))]


def _lengths(layers: int, stages: int, less: int) -> list[int]:
    """The number of layers of each stage. The last counts as having `less` more than it has."""
    each, more = divmod(layers + less, stages)
    lengths = [each + (s < more) for s in range(stages)]
    lengths[-1] -= less
    return lengths


def balanced(layers: int, placement: Placement, head: float) -> int:
    """The `last_stage_less_layers` with which the slowest rank has the least work, where the head costs as much as
    `head` layers. The smallest of equal ones; 0 without a pipeline."""
    stages = placement.pp * placement.vpp

    def slowest(less: int) -> float:
        costs: list[float] = [*_lengths(layers, stages, less)]
        costs[-1] += head
        return max(sum(costs[s] for s in own) for own in placement.stages)

    least_layers = (less for less in range(layers) if _lengths(layers, stages, less)[-1] > 0)
    return min(least_layers, key=slowest, default=0) if placement.pp > 1 else 0

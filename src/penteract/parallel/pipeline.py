"""Pipeline parallelism.

Split      layers, into pp·vpp stages; the schedule's placement assigns stages to ranks.
Traffic    between stages: forward sends the residual stream, backward its gradient. The schedule decides when.
Costs      little traffic, idle time at both ends of a step, and activations of as many micro-batches as are in flight.
Helps      across slow links and for models that do not fit otherwise; hurts when micro-batches are few.
Papers     Narayanan 2021 (2104.04473) §2.2; Qi 2023 (2401.10241)
"""

from __future__ import annotations

from itertools import pairwise


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage. If they do not divide evenly, the first stages take one more: the last has the head."""
    each, more = divmod(layers, stages)
    starts = [s * each + min(s, more) for s in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(starts)]

"""Pipeline parallelism.

Split      layers, into pp·vpp stages; which rank has a stage, the schedule's placement says.
Traffic    the stage border: forward send the residual stream, backward send its gradient. When, is the schedule's.
Costs      little traffic, idle time at both ends of a step, and activations of as many micro-batches as are in flight.
Helps      across slow links and for models that fit nowhere; hurts when micro-batches are few.
Papers     Narayanan 2021 (2104.04473) §2.2; Qi 2023 (2401.10241)
"""

from __future__ import annotations

from itertools import pairwise


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage. Where they do not divide, the early stages take one more: the last has the head."""
    each, more = divmod(layers, stages)
    starts = [s * each + min(s, more) for s in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(starts)]

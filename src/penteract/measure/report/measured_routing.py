"""A row with experts on several ranks, planned again with the routing that it had. Plans take every rank to get as many
rows as the others; how far that was from true is a matter of data, and no error of the model of memory or time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from penteract.config.run import RunSpec
from penteract.measure.report.accuracy_row import Amounts
from penteract.readings.estimator import Estimator
from penteract.readings.layers.expert_load import Recorded
from penteract.readings.price import price
from penteract.step.expert_layers import layers_with_rows
from penteract.step.program import compile_run
from penteract.units import GIB

AS_ROUTED = ", routed as it was"  # behind the name of a row


def as_routed(estimator: Estimator | None, run: RunSpec, rank: int, rows: Sequence[int], imbalance: float) -> Amounts:
    """Memory of `rank` with the rows that its experts were sent, by layer and then micro-batch, and a step in which the
    fullest rank gets `imbalance` times the mean, on that estimator's cluster; None: memory alone. Raises ValueError
    where there are more or fewer rows than exchanges."""
    kinds, policy = run.optimizer.optimizer_kinds, run.precision.policy
    p = compile_run(run, rank)
    keys = product(layers_with_rows(p), range(run.layout.gradient_accumulation_steps))
    load = Recorded(dict(zip(keys, rows, strict=True)))
    found = Amounts(allocated=price(p, load).allocated / GIB)
    if estimator is None:
        return found
    uneven = Estimator(run.model, estimator.cluster, run.sequence_length, policy, kinds, estimator.at_once, imbalance)
    return replace(found, step=1e3 * uneven.time(uneven.estimate(run.layout)).seconds)

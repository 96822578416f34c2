"""What would fit where a run does not: single changes of its layout, priced and timed by the planner's estimator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penteract.config.hardware import Cluster
from penteract.config.layout import ZERO_STAGES, Layout
from penteract.config.recompute import ops_of
from penteract.config.rules.legal import problems
from penteract.config.run import RunSpec
from penteract.readings.estimator import Estimator
from penteract.units import Bytes, show_bytes

MOST = 3  # that are shown


def smaller(spec: RunSpec, cluster: Cluster, usable: Bytes) -> tuple[str, ...]:
    """The fastest changes of one choice that fit, as text for a command line, each with its bytes and its step beside
    the present one."""
    policy, length = spec.precision.policy, spec.sequence_length
    prices = Estimator(spec.model, cluster, length, policy, optimizer_kinds=spec.optimizer.optimizer_kinds)
    now = prices.time(prices.estimate(spec.layout)).seconds
    found = list[tuple[float, str]]()
    for words, layout in _changes(spec.layout):
        if problems(spec.model, layout, length, global_batch_size=spec.layout.global_batch_size):
            continue
        estimate = prices.estimate(layout)
        if estimate.allocated <= usable:
            ratio = prices.time(estimate).seconds / now
            found.append((ratio, f"{words} ({show_bytes(estimate.allocated)}, {ratio:.2f} times the step)"))
    return tuple(text for _, text in sorted(found)[:MOST])


def _changes(lay: Layout) -> Iterator[tuple[str, Layout]]:
    """Each smaller micro-batch, higher ZeRO stage, more recomputation, and offload."""
    each = lay.micro_batch_size * lay.gradient_accumulation_steps
    for size in range(lay.micro_batch_size - 1, 0, -1):
        if each % size == 0:
            steps = each // size
            yield (
                f"--batch.micro_batch_size {size}",
                replace(lay, micro_batch_size=size, gradient_accumulation_steps=steps),
            )
    for stage in ZERO_STAGES:
        if stage > lay.zero:
            yield f"--parallel.zero {stage}", replace(lay, zero=stage)
    whole = ops_of("full")
    if lay.recompute != whole:
        yield "--memory.recompute full", replace(lay, recompute=whole, recompute_every=1, recompute_first=0)
    if not lay.offload_optimizer:
        yield "--memory.offload_optimizer true", replace(lay, offload_optimizer=True)

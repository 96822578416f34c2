"""What is predicted of a run before it starts. The command line alone may use both the predictions and the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from penteract.cli.resolve.card_cluster import Card, cluster_of, planned_seconds
from penteract.config.run import RunPrediction, RunSpec
from penteract.errors import BadInput
from penteract.readings.composed import Composer
from penteract.readings.ideal import Forward
from penteract.readings.memory.host_copies import snapshot_bytes
from penteract.readings.price import price
from penteract.step.program import compile_run
from penteract.units import Bytes

_WALKED = 256  # layers times micro-batches: a fraction of a second


def predict_run(run: RunSpec, card: Card | None, environment: Mapping[str, str] = os.environ) -> RunPrediction:
    """Memory of rank 0, FLOPs, and, on a card of the catalog, the time of a step. `environment`: a launcher's, which
    says how many ranks share a host."""
    kinds, policy = run.optimizer.optimizer_kinds, run.precision.policy
    composer = Composer(run.model, run.sequence_length, policy, kinds)
    flops = Forward.of(composer).step(run.tokens_per_step, run.sequence_length).full
    nodes = cluster_of(card, run.layout.world, environment)
    copied = snapshot_bytes(composer.bucket_planner, run.layout) if run.saves_in_background else 0
    prediction = RunPrediction(allocated_bytes=_allocated(run, composer), model_flops=flops, snapshot_bytes=copied)
    if nodes is None or nodes.gpu is None:
        return prediction
    try:
        seconds, peak = planned_seconds(run, nodes), run.layout.world * nodes.gpu.peak(policy.products)
    except BadInput:  # the card has no products in this dtype, so nothing is known of its time
        return prediction
    return replace(prediction, step_s=seconds, peak_flops=peak)


def _allocated(run: RunSpec, composer: Composer) -> Bytes:
    """Bytes that rank 0 will allocate.

    Where routing decides sizes, a walk of the step is closer than a sum over layers, which is a bound; a long step has
    the bound, because a walk takes as long as its micro-batches and layers are many.
    """
    summed = composer.rank(run.layout, 0)
    if not summed.routed or run.layout.gradient_accumulation_steps * run.model.layers > _WALKED:
        return summed.allocated
    return price(compile_run(run)).allocated

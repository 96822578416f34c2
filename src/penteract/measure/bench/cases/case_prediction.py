"""What is predicted of a case: memory always, time where a cluster is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penteract.config.hardware import HEADROOM, Cluster
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.measure.schemas.sweep import CasePrediction
from penteract.readings.composed import Composer
from penteract.readings.estimator import Estimator
from penteract.readings.ideal import Forward, StepFlops
from penteract.readings.memory.rank_memory import MemoryReading


class Predicted(NamedTuple):
    """What is predicted, and the model's FLOPs of a step, all ranks."""

    prediction: CasePrediction
    flops: StepFlops


@dataclass(slots=True)
class Predictor:
    """Predicts runs; what several share is computed once.

    `cluster`: whose GPUs are predicted; None: memory alone. `room`: the bytes that tensors of one rank of a run may
    take here, asked where there is no cluster; None: not known.
    """

    cluster: Cluster | None = None
    headroom: float = HEADROOM
    room: Callable[[RunSpec], int | None] = lambda run: None
    _readings: dict[Any, tuple[Composer, Forward]] = field(default_factory=dict[Any, "tuple[Composer, Forward]"])
    _estimators: dict[Any, Estimator | BadInput] = field(default_factory=dict[Any, "Estimator | BadInput"])

    def __call__(self, run: RunSpec) -> Predicted:
        """Of a run with a complete layout."""
        composer, forward = self._reading(run)
        flops = forward.step(run.tokens_per_step, run.sequence_length)
        memory = MemoryReading(composer).of(run.layout).allocated
        usable = self.room(run) if self.cluster is None else self.cluster.usable(self.headroom) or None
        bare = CasePrediction(allocated_bytes=memory, usable_bytes=usable, basis="memory alone: no cluster is named")
        if self.cluster is None:
            return Predicted(bare, flops)
        found = self._estimator(run, self.cluster)
        if isinstance(found, BadInput):  # this device has no such products, so nothing prices them
            return Predicted(replace(bare, basis=f"memory alone: {found.what}"), flops)
        seconds = found.time(found.estimate(run.layout)).seconds
        gpu = found.cluster.gpu
        peak = None if gpu is None else gpu.peak(run.precision.policy.products) * run.layout.world
        timed = replace(
            bare, step_s=seconds, tokens_per_s_per_gpu=run.tokens_per_step / seconds / run.layout.world,
            mfu=None if peak is None else flops.full / seconds / peak, basis=found.basis["product"],
        )  # fmt: skip
        return Predicted(timed, flops)

    def _reading(self, run: RunSpec) -> tuple[Composer, Forward]:
        key = self._key(run)
        if key not in self._readings:
            composer = Composer(run.model, run.sequence_length, run.precision.policy, run.optimizer.optimizer_kinds)
            self._readings[key] = composer, Forward.of(composer)
        return self._readings[key]

    def _estimator(self, run: RunSpec, named: Cluster) -> Estimator | BadInput:
        """The estimator for a run's ranks; more than the cluster has are taken to be in one node."""
        world = run.layout.world
        large = named if world <= named.gpus else replace(named, gpus=world, gpus_per_node=world)
        key = (*self._key(run), large.gpus)
        if key not in self._estimators:
            try:
                made = Estimator.of_run(run, large)
            except BadInput as refused:
                made = refused
            self._estimators[key] = made
        return self._estimators[key]

    def _key(self, run: RunSpec) -> tuple[Any, ...]:
        return run.model, run.sequence_length, run.precision.policy, run.optimizer.optimizer_kinds

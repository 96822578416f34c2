"""Estimates for a layout on a cluster: memory and a lower bound of the step time from sums, and the step time from a
simulated step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penteract.config.hardware import Cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy, check_layout, policy
from penteract.config.run import RunSpec
from penteract.ops.declarations.quantised.fp8 import check_sizes
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.ideal import PARTS, Forward, StepFlops
from penteract.readings.memory.memory_bound import Growths
from penteract.readings.memory.rank_memory import Least, MemoryReading, RankMemory
from penteract.readings.time.lower_bounds.bounds import Bounds
from penteract.readings.time.step import StepClock
from penteract.step.ring_buffer import DEPTH
from penteract.units import Bytes, Flops, Seconds

_FEW_PASSES = 512  # forward passes of a step: playing so many costs less than simulating one rank


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """Memory by kind of the fullest pipeline rank, in bytes, and a lower bound of the step's time.

    memory    parameters, gradients, optimizer, activations (kept and temporary), other (input data, the workspace of
              kernels, the ring buffers of ZeRO 2 and 3)
    by_pp_rank  the sum of all kinds, for each pipeline rank
    host      bytes in host memory, of the rank that keeps most there
    """

    layout: Layout
    memory: Mapping[str, Bytes]
    allocated: Bytes
    by_pp_rank: tuple[Bytes, ...]
    at_least: Seconds
    host: Bytes = 0
    precision: Policy = RECIPES["bf16"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts on the slowest rank. The parts sum to the step."""

    seconds: Seconds
    parts: Mapping[str, Seconds]
    limited_by: str


@dataclass(slots=True)
class Estimator:
    """Estimates layouts of one model on one cluster. Results that layouts share are computed once.

    at_once  the host reads the outcome of each step before it launches the next one. `penteract train` reads it a step
             later on GPUs; scripts that call `Trainer.step` do not
    imbalance  rows that the experts of the fullest rank get, over the mean: all wait for it
    """

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str | Policy = "bf16"
    optimizer_kinds: OptimizerKinds = PLAIN
    at_once: bool = False
    imbalance: float = 1.0
    composer: Composer = field(init=False)
    memory: MemoryReading = field(init=False)
    rates: Rates = field(init=False)
    steps: StepClock = field(init=False)
    bounds: Bounds = field(init=False)
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        """Resolve the precision and make the readings. Raises BadInput if the cluster names no device, or the device
        has no matrix products in this precision."""
        self.precision = policy(self.precision)
        self.composer = Composer(self.model, self.sequence_length, self.precision, self.optimizer_kinds, self.imbalance)
        self.memory = MemoryReading(self.composer)
        self.rates = Rates.of(self.cluster, self.precision.products, fp8=self.precision.fp8 is not None)
        self.steps = StepClock(self.composer, self.cluster, self.rates, self.at_once)
        self.bounds = Bounds.contended(self.steps)

    @staticmethod
    def of_run(run: RunSpec, cluster: Cluster) -> Estimator:
        """Estimates layouts of a run's model, as the run trains it."""
        kinds = run.optimizer.optimizer_kinds
        return Estimator(run.model, cluster, run.sequence_length, run.precision.policy, kinds)

    @property
    def policy(self) -> Policy:
        """The dtype of each role (parameters, gradients, …)."""
        return self.composer.policy

    @property
    def basis(self) -> Mapping[str, str]:
        """For each rate, whether it was measured or modelled, and from what."""
        return self.rates.basis

    # ---- a layout --------------------------------------------------------------------------------------------

    def memory_of(self, layout: Layout) -> RankMemory:
        """Memory of a legal layout. It costs half of an estimate."""
        return self.memory.of(layout)

    def estimate(
        self, layout: Layout, memory: RankMemory | None = None, at_least: Seconds | None = None
    ) -> LayoutEstimate:
        """Memory of a legal layout, and a lower bound of its step time. `memory` and `at_least`: these, if they are
        known."""
        memory = memory or self.memory.of(layout)
        at_least = self.bounds.of(layout) if at_least is None else at_least
        return LayoutEstimate(
            layout, memory.kinds, memory.allocated, memory.by_pp_rank, at_least, memory.host, self.composer.policy
        )

    def check_sizes(self, layout: Layout) -> None:
        """Refuse, as the engine does, a layout that cuts linear layers into parts which are no multiple of the FP8
        recipe's blocks, does not gather weights which the recipe gathers quantised, or sends blocks in fp16."""
        check_layout(self.composer.policy, layout)
        if self.composer.policy.fp8 is None:
            return
        chunks_per_sequence = 2 if layout.cp > 1 else 1
        for kind in {kind for chain in self.composer.layers_by_stage(layout) for kind, _ in chain}:
            check_sizes(self.composer.layer_program(layout, kind).sites, chunks_per_sequence)

    def least(self, layout: Layout) -> Least:
        """A lower bound of a layout's memory, as a function of the micro-batch size."""
        return self.memory.least(layout)

    def resident(self, layout: Layout) -> tuple[Bytes, ...]:
        """What each group of pipeline ranks holds between steps: the same with any recomputation."""
        return self.memory.resident(layout)

    def growth(self, layout: Layout) -> Growths:
        """What one micro-batch of a layout keeps per sequence."""
        return self.memory.floor.growth(layout)

    def kept(self, layout: Layout, growth: Growths) -> list[Bytes]:
        """Bytes of activations that each group of pipeline ranks keeps at least, per sequence of a micro-batch.

        `growth`: what one micro-batch keeps; the schedule of `layout` says how many are in flight.
        """
        return self.memory.floor.per_sequence(layout, growth)

    def floor(self, layout: Layout) -> Bytes:
        """A lower bound of the bytes on the fullest rank: `estimate.allocated` is never less."""
        return self.memory.at_least(layout, self.memory.least(layout))

    def played(self, estimate: LayoutEstimate) -> Seconds:
        """A tighter lower bound of the step time than the estimate's own, by the waits of its schedule, if that has so
        few passes that this bound costs little. Parameters of chunks that fit into a ring of buffers may be gathered
        before their passes begin, which are no longer for them then: this bound would seldom be higher."""
        bound, lay = estimate.at_least, estimate.layout
        ahead = lay.zero == 3 and not lay.reduce_scatter_once and self.model.layers <= DEPTH * lay.stages
        return max(bound, self.bounds.played(lay)) if lay.pp > 1 and _has_few_passes(lay) and not ahead else bound

    def closer(self, estimate: LayoutEstimate) -> Seconds:
        """The same by the pipeline rank with the longest passes. It costs more, but far less than a simulation. Where
        no state is sharded by unit, little happens beside passes: then it is seldom above `played`."""
        bound, lay = estimate.at_least, estimate.layout
        useful = lay.pp > 1 and (lay.cuts_units or not _has_few_passes(lay))
        return max(bound, self.bounds.alone(lay)) if useful else bound

    def first(self, estimate: LayoutEstimate) -> Seconds:
        """A still tighter bound: the first simulated step, from which `time` continues."""
        return self.steps.seconds_to_first_norm(estimate.layout)

    def time(self, estimate: LayoutEstimate) -> StepTime:
        """The simulated step time."""
        step = self.steps.step(estimate.layout)
        lay, parts = estimate.layout, dict(zip(PARTS, step.parts, strict=True))
        parts = {name: parts[name] for name in PARTS if name != "host" or lay.offload or lay.offload_optimizer}
        return StepTime(step.seconds, parts, self._limit(lay, parts, step.seconds))

    def model_flops(self, tokens: int) -> StepFlops:
        """FLOPs of training on `tokens` tokens at this sequence length. They do not depend on the layout."""
        return self._forward_flops().step(tokens, self.sequence_length)

    def _forward_flops(self) -> Forward:
        if self._forward is None:
            self._forward = Forward.of(self.composer)
        return self._forward

    def recomputed_flops(self, layout: Layout) -> Flops:
        """FLOPs of recomputation in a step, of all ranks together."""

        def forward(lay: Layout) -> Flops:
            return sum(self.composer.work(lay, r)[0]["forward"] for r in range(lay.pp)) * (lay.world // lay.pp)

        return forward(layout) - forward(replace(layout, recompute=(), recompute_else=()))

    def _limit(self, layout: Layout, parts: Mapping[str, Seconds], seconds: Seconds) -> str:
        """The main reason why a step does not reach the device's peak."""
        ideal = self._ideal(layout)
        return "" if ideal is None else self._forward_flops().limit(parts, seconds, ideal)

    def ideal(self, layout: Layout) -> Mapping[str, Seconds]:
        """Seconds that a step's products take at the device's peak, with half of attention's, by the parts of
        `StepTime` that they belong to; empty without a GPU. What else a part takes is lost to something."""
        ideal = self._ideal(layout)
        return {} if ideal is None else self._forward_flops().split(ideal)

    def _ideal(self, layout: Layout) -> Seconds | None:
        if self.cluster.gpu is None:
            return None
        flops = self.model_flops(layout.global_batch_size * self.sequence_length).causal
        return flops / layout.world / self.cluster.gpu.peak(policy(self.precision).products)


def _has_few_passes(layout: Layout) -> bool:
    return layout.stages * layout.gradient_accumulation_steps <= _FEW_PASSES

"""What a layout takes on a cluster: memory and a bound of its time from sums, its time from a step that is played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penteract.config.hardware import Cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKinds
from penteract.config.precision.fp8 import check_gather
from penteract.config.precision.policy import RECIPES, Policy, policy
from penteract.ops.declarations.fp8 import check_sizes
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.ideal import PARTS, Forward, StepFlops
from penteract.readings.memory import Least, MemoryReading
from penteract.readings.memory_bound import Growths
from penteract.readings.time.bounds import Bounds
from penteract.readings.time.step import StepClock
from penteract.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """Memory by kind of the fullest pipeline rank, in bytes, and a lower bound of the step's time.

    memory    parameters, gradients, optimizer, activations (kept and temporary), other (data, what a declaration
              allocates, what ZeRO 2 and 3 have whole for a while)
    by_stage  all kinds together, of each pipeline rank
    host      bytes on the host, of the rank that keeps most there
    """

    layout: Layout
    memory: Mapping[str, Bytes]
    allocated: Bytes
    by_stage: tuple[Bytes, ...]
    at_least: Seconds
    host: Bytes = 0
    precision: Policy = RECIPES["bf16"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts on the rank that sets the pace: they sum to it."""

    seconds: Seconds
    parts: Mapping[str, Seconds]
    limited_by: str


@dataclass(slots=True)
class Estimator:
    """Quotes layouts of one model on one cluster. What two of them share is priced once."""

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    precision: str | Policy = "bf16"
    optimizer_kinds: OptimizerKinds = PLAIN
    composer: Composer = field(init=False)
    memory: MemoryReading = field(init=False)
    rates: Rates = field(init=False)
    steps: StepClock = field(init=False)
    bounds: Bounds = field(init=False)
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        """Resolve the precision and make the readings. Raises BadInput where the cluster names no device, or one
        without such products."""
        self.precision = policy(self.precision)
        self.composer = Composer(self.model, self.sequence_length, self.precision, self.optimizer_kinds)
        self.memory = MemoryReading(self.composer)
        self.rates = Rates.of(self.cluster, self.precision.products, fp8=self.precision.fp8 is not None)
        self.steps = StepClock(self.composer, self.cluster, self.rates)
        self.bounds = Bounds(self.steps)

    @property
    def policy(self) -> Policy:
        """The precision as dtypes by role."""
        return self.composer.policy

    @property
    def basis(self) -> Mapping[str, str]:
        """Where each rate comes from."""
        return self.rates.basis

    # ---- a layout --------------------------------------------------------------------------------------------

    def estimate(self, layout: Layout) -> LayoutEstimate:
        """Price a legal layout."""
        held = self.memory.of(layout)
        bound = self.bounds.of(layout)
        return LayoutEstimate(layout, held.kinds, held.allocated, held.by_stage, bound, held.host, self.composer.policy)

    def check_sizes(self, layout: Layout) -> None:
        """Refuse, as the engine does, a layout whose linears are not whole units of their FP8 recipe, or that does not
        gather what travels as codes."""
        if self.composer.policy.fp8 is None:
            return
        check_gather(self.composer.policy.fp8, layout)
        pieces = 2 if layout.cp > 1 else 1
        for kind in {kind for chain in self.composer.stage_chains(layout) for kind, _ in chain}:
            check_sizes(self.composer.piece(layout, kind).sites, pieces)

    def least(self, layout: Layout) -> Least:
        """What a layout holds at least, whatever the size of its micro-batch."""
        return self.memory.least(layout)

    def kept(self, layout: Layout, growth: Growths) -> list[Bytes]:
        """What each group of pipeline ranks keeps at least for each sequence of a micro-batch: by the schedule of a
        layout, of another's `growth`."""
        return self.memory.floor.per_sequence(layout, growth)

    def floor(self, layout: Layout) -> Bytes:
        """Bytes that the fullest rank holds at least: `estimate.allocated` is no less."""
        return self.memory.at_least(layout, self.memory.least(layout))

    def closer(self, estimate: LayoutEstimate) -> Seconds:
        """A bound nearer to the step's time than the estimate's own: dearer, and far cheaper than to play it."""
        known, lay = estimate.at_least, estimate.layout
        return max(known, self.bounds.alone(lay)) if lay.pp > 1 else known

    def first(self, estimate: LayoutEstimate) -> Seconds:
        """A bound nearer still, from the first step of a run, which `time` goes on from."""
        return self.steps.first(estimate.layout)

    def time(self, estimate: LayoutEstimate) -> StepTime:
        """The step's time, played."""
        told = self.steps.step(estimate.layout)
        lay, parts = estimate.layout, dict(zip(PARTS, told.parts, strict=True))
        parts = {name: parts[name] for name in PARTS if name != "host" or lay.offload or lay.offload_optimizer}
        return StepTime(told.seconds, parts, self._limit(lay, parts, told.seconds))

    def model_flops(self, tokens: int) -> StepFlops:
        """What training on `tokens` tokens asks, at this sequence length, whatever the layout."""
        return self._asked().step(tokens, self.sequence_length)

    def _asked(self) -> Forward:
        if self._forward is None:
            self._forward = Forward.of(self.composer)
        return self._forward

    def recomputed_flops(self, layout: Layout) -> Flops:
        """What all ranks together compute a second time in a step."""

        def forward(lay: Layout) -> Flops:
            return sum(self.composer.work(lay, r)[0]["forward"] for r in range(lay.pp)) * (lay.world // lay.pp)

        return forward(layout) - forward(replace(layout, recompute=(), recompute_else=()))

    def _limit(self, layout: Layout, parts: Mapping[str, Seconds], seconds: Seconds) -> str:
        """The largest reason why a step is not at the device's peak."""
        if self.cluster.gpu is None:
            return ""
        asked = self.model_flops(layout.global_batch_size * self.sequence_length).causal
        ideal = asked / layout.world / self.cluster.gpu.peak(policy(self.precision).products)
        return self._asked().limit(parts, seconds, ideal)

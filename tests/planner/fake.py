"""An estimator of made-up formulas, quick and known: what the planner makes of estimates is tested with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES, Policy
from penteract.readings.memory.rank_memory import Least

GIB = 2**30


@dataclass(frozen=True)
class LayoutEstimate:
    layout: Layout
    memory: Mapping[str, int]
    allocated: int
    by_pp_rank: tuple[int, ...]
    at_least: float
    precision: Policy = RECIPES["bf16"]
    host: int = 0


@dataclass(frozen=True)
class StepTime:
    seconds: float
    parts: Mapping[str, float]
    limited_by: str


@dataclass(frozen=True)
class StepFlops:
    full: int
    causal: int


@dataclass
class FakeEstimator:
    """Memory and time as formulas of the layout. `slack` is how far a step is above its bound, by layout."""

    model: ModelSpec
    slack: Callable[[Layout], float] = lambda lay: 0.0
    policy: Policy = RECIPES["bf16"]
    estimated: list[Layout] = field(default_factory=list)
    timed: list[Layout] = field(default_factory=list)

    def memory_of(self, lay: Layout) -> LayoutEstimate:
        return self.estimate(lay)

    def estimate(
        self, lay: Layout, memory: LayoutEstimate | None = None, at_least: float | None = None
    ) -> LayoutEstimate:
        assert at_least in (None, self._passes(lay))
        if memory:
            return memory
        self.estimated.append(lay)
        held, shards = 16 * GIB // (lay.tp * lay.pp), lay.shard_group or lay.dp * lay.cp
        memory = {
            "parameters": held // (shards if lay.zero == 3 and not lay.reshard_after_step else 1),
            "gradients": 2 * held // (shards if lay.zero > 1 and not lay.reduce_scatter_once else 1),
            "optimizer": 6 * held // (shards if lay.zero else 1),
            "activations": (2 if lay.recompute == ("*",) else 10) * GIB * lay.micro_batch_size // (lay.tp * lay.cp),
            "other": GIB // 4,
        }  # fmt: skip
        total = sum(memory.values())
        return LayoutEstimate(lay, memory, total, (total,) * lay.pp, self._passes(lay))

    def floor(self, lay: Layout) -> int:
        """Below what an estimate says, by an eighth: it must spare prices, and change nothing."""
        least = self.least(lay)
        return least.total(self.kept(lay, least.growth), lay.micro_batch_size)

    def least(self, lay: Layout) -> Least:
        estimated = self.estimated[:]
        held = self.estimate(lay).memory
        self.estimated[:] = estimated
        each = held["activations"] // lay.micro_batch_size
        return Least(((sum(held.values()) - held["activations"]) * 7 // 8,), each * 7 // 8)

    def resident(self, lay: Layout) -> tuple[int, ...]:
        return self.least(lay).resident

    def growth(self, lay: Layout) -> int:
        return self.least(lay).growth  # type: ignore[return-value]

    def kept(self, lay: Layout, growth: int) -> list[int]:
        """Of one group of ranks."""
        return [growth]

    def check_sizes(self, lay: Layout) -> None:
        """All go."""

    @property
    def bounds(self) -> FakeEstimator:
        return self

    def of(self, lay: Layout) -> float:
        return self._passes(lay)

    def at_least(self, lay: Layout) -> float:
        return 0.98 * self._passes(lay)

    def quickest(self, lay: Layout, largest: int) -> None:
        """Nothing: `roughly` needs no more than the layout."""

    def roughly(self, lay: Layout, largest: int, quick: None) -> float:
        """As if each micro-batch were as quick for each sequence as the largest."""
        return 0.98 * self._passes(lay) * (1 + 0.1 / largest) / (1 + 0.1 / lay.micro_batch_size)

    def roughest(self, lay: Layout, largest: int, mesh: tuple[int, int]) -> float:
        """It is the same for each size."""
        return self.roughly(lay, largest, None)

    def played(self, estimate: LayoutEstimate) -> float:
        """Between its bound and its time."""
        return 0.8 * estimate.at_least + 0.2 * sum(self._parts(estimate.layout).values())

    def closer(self, estimate: LayoutEstimate) -> float:
        """Nearer."""
        return 0.4 * estimate.at_least + 0.6 * sum(self._parts(estimate.layout).values())

    def first(self, estimate: LayoutEstimate) -> float:
        """Nearer still."""
        return 0.1 * estimate.at_least + 0.9 * sum(self._parts(estimate.layout).values())

    def time(self, estimate: LayoutEstimate) -> StepTime:
        self.timed.append(estimate.layout)
        parts = self._parts(estimate.layout)
        limit = max(("tensor", "pipeline", "compute"), key=lambda k: parts[k] * (0.1 if k == "compute" else 1))
        return StepTime(sum(parts.values()), parts, limit)

    def model_flops(self, tokens: int) -> StepFlops:
        return StepFlops(10**10 * tokens, 9 * 10**9 * tokens)

    @property
    def basis(self) -> Mapping[str, str]:
        return {"product": "made up"}

    def _passes(self, lay: Layout) -> float:
        parts = self._parts(lay)
        return sum(parts[name] for name in ("compute", "tensor", "context") if name in parts)

    @staticmethod
    def _cut(lay: Layout) -> float:
        """How much goes over wires for each micro-batch."""
        return max(0.0, lay.zero - 1 - 0.5 * lay.reduce_scatter_once - 0.5 * lay.reshard_after_step)

    def _parts(self, lay: Layout) -> dict[str, float]:
        micros = lay.gradient_accumulation_steps
        work = lay.global_batch_size / lay.world * (1.33 if lay.recompute == ("*",) else 1.0)
        compute = work * (1 + 0.1 / lay.micro_batch_size)
        bubble = compute * (lay.pp - 1) / (micros * lay.vpp) * (0.4 if lay.schedule == "zb_h1" else 1)
        parts = dict.fromkeys(("attention", "pointwise", "context", "expert", "data", "update", "launch"), 0.0)
        return parts | {
            "compute": compute, "tensor": 0.05 * compute * (lay.tp - 1), "context": 0.03 * compute * (lay.cp - 1),
            "pipeline": bubble, "data": 0.02 * (lay.dp > 1) + 0.01 * self._cut(lay) * micros, "launch": self.slack(lay),
        }  # fmt: skip

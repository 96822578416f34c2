"""FLOPs and bytes of each part of a planned step, by its timeline: a clock whose seconds are work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

from penteract.config.layout import Layout
from penteract.ops.declarations.declaration import Product, ScaledBy
from penteract.readings.costs.rates import Rates
from penteract.readings.time.step import StepClock
from penteract.readings.time.timelines.timeline import Event, emit_events
from penteract.readings.time.timelines.trace import kind

Work = dict[tuple[int, str], int]  # (pp_rank, name) -> FLOPs or bytes in a step


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsOnly(Rates):
    """A picosecond for each FLOP of a product or of attention, and none for memory traffic."""

    def product(self, p: Product) -> float:
        """Seconds of one batch of products."""
        return 2e-12 * p.times * p.m * p.n * p.k

    def scaled(self, p: Product, by: ScaledBy = "tensors") -> float:
        """The same of FP8."""
        return FlopsOnly.product(self, p)

    def attention(self, products_flops: float, elements: int, *, causal: bool, **_: Any) -> float:
        """Seconds of fused attention, without the masked half."""
        return products_flops * (0.5e-12 if causal else 1e-12)

    def moved(self, amount: int, walked: int = 0) -> float:
        """None."""
        return 0.0

    def update(self, amount: int) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesOnly(Rates):
    """A picosecond for each byte that a kernel reads or writes, and none for products and attention."""

    def product(self, p: Product) -> float:
        """None."""
        return 0.0

    def scaled(self, p: Product, by: ScaledBy = "tensors") -> float:
        """None."""
        return 0.0

    def attention(self, products_flops: float, elements: int, **_: Any) -> float:
        """None."""
        return 0.0

    def moved(self, amount: int, walked: int = 0) -> float:
        """Seconds of a pointwise kernel."""
        return 1e-12 * amount

    def update(self, amount: int) -> float:
        """Seconds of an update."""
        return 1e-12 * amount


def with_rates(steps: StepClock, rates: type[Rates]) -> StepClock:
    """A clock of the same step with other rates, and without what the first one has cached."""
    made = rates(**{f.name: getattr(steps.rates, f.name) for f in fields(Rates)})
    return StepClock(steps.composer, steps.cluster, made)


def planned_work(steps: StepClock, layout: Layout, rates: type[Rates]) -> Work:
    """FLOPs (`FlopsOnly`) or bytes (`BytesOnly`) of what a step computes, by pipeline rank and name."""
    found = Counter[tuple[int, str]]()

    def add(e: Event) -> None:
        if e.stream == "compute" and kind(e) != "wait":
            found[e.pp_rank, e.name] += e.end - e.start

    counting = with_rates(steps, rates)
    emit_events(replace(counting, rates=replace(counting.rates, contention=1.0)), layout, add)
    return {key: size for key, size in found.items() if size}

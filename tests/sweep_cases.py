"""Which layouts a sweep runs: every legal mesh of 2, 4 and 8 ranks with every schedule and every context method.

What else can be chosen is covered pairwise: each base case takes, of a few candidates, the one with the most pairs
(of two options, or of an option and the schedule, the context method or an axis in use) that no case had before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

from layouts import Case
from penteract.config.layout import CP_METHODS, ZERO_STAGES, Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.schedule.registry import SCHEDULES, ScheduleName
from strategies import RECOMPUTES, legal
from tiny import SIZES

DENSE = ModelSpec(**SIZES)
EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=8, top_k=2, ffn_size=16))
WORLDS = (2, 4, 8)
DEGREES = (1, 2, 4, 8)
CANDIDATES = 24

# option -> its values. "more_layers": beyond one for each stage. "rounds": of micro-batches.
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "micro_batch_size": (1, 2),
    "rounds": (1, 2),
    "recompute": RECOMPUTES,
    "bucket_bytes": (25 * 2**20, 2**15, 0),
    "zero": ZERO_STAGES,
    "more_layers": (0, 1),
    "tied": (False, True),
    "heads": ("plain", "normed", "latent"),
    "mtp_layers": (0, 1, 2),
    "norm": ("rms", "layer"),
    "sliding_window": (0, 5),
    "vpp": (1, 2),
    "expert_tp": (False, True),
    "balance": ("loss", "bias", "none"),
    "score": ("softmax", "sigmoid"),
    "shared_ffn_size": (0, 16),
    "groups": ("none", "best", "best two"),
}
_OF_MODEL = ("tied", "norm", "sliding_window", "mtp_layers")
_OF_EXPERTS = ("balance", "score", "shared_ffn_size")
_LATENT = LatentSpec(kv_rank=6, plain_size=2, rope_size=2, value_size=5, query_rank=7)
_HEADS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"qk_norm": True},
    "latent": {"latent": _LATENT, "kv_heads": SIZES["heads"]},
}
_GROUPS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "best": {"groups": 2, "top_groups": 1, "group_score": "max"},
    "best two": {"groups": 4, "top_groups": 2, "group_score": "top2"},
}

Choice = Mapping[str, Any]
Pair = frozenset[tuple[str, Any]]


@dataclass(frozen=True)
class Base:
    """What is covered in full."""

    model: ModelSpec
    layout: Layout
    schedule: ScheduleName

    def options(self) -> dict[str, tuple[Any, ...]]:
        """The options that mean something here."""
        lay, left = self.layout, dict(OPTIONS)
        if self.model.moe is None:
            left = {n: v for n, v in left.items() if n not in (*_OF_EXPERTS, "groups", "expert_tp")}
        if lay.tp == 1:
            left.pop("expert_tp", None)
        if self.schedule == "interleaved":
            left["vpp"] = (2,)
        elif self.schedule != "gpipe" or lay.pp == 1:
            left.pop("vpp")
        return left

    def facts(self, choice: Choice) -> list[tuple[str, Any]]:
        """What a pair is made of."""
        lay = self.layout
        used = [(axis, True) for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(lay, axis) > 1]
        method = [("cp_method", lay.cp_method)] if lay.cp > 1 else []
        return [*choice.items(), ("schedule", self.schedule), *method, *used]

    def case(self, choice: Choice) -> Case:
        lay = self.layout
        lay = replace(
            lay,
            vpp=choice.get("vpp", 1),
            expert_tp=lay.tp if choice.get("expert_tp") else 1,
            schedule="1f1b" if self.schedule == "overlapped" else self.schedule,
            micro_batch_size=choice["micro_batch_size"],
            gradient_accumulation_steps=choice["rounds"] * (lay.pp if self.schedule == "interleaved" else 2),
            recompute=choice["recompute"],
            bucket_bytes=choice["bucket_bytes"],
            zero=choice["zero"],
        )
        model = replace(
            self.model,
            layers=max(2, lay.stages) + choice["more_layers"],
            **{n: choice[n] for n in _OF_MODEL},
            **_HEADS[choice["heads"]],
        )
        if model.moe is not None:
            routed = {n: choice[n] for n in _OF_EXPERTS} | _GROUPS[choice["groups"]]
            model = replace(model, moe=replace(model.moe, **routed))
        overlapped: ScheduleName | None = "overlapped" if self.schedule == "overlapped" else None
        return Case(model, lay, schedule=overlapped)


def bases() -> Iterator[Base]:
    """Every mesh, schedule and context method that the two models allow, smallest world first."""
    for world, model in product(WORLDS, (DENSE, EXPERTS)):
        for dp, tp, pp, cp, ep in product(DEGREES, repeat=5):
            if dp * tp * pp * cp != world or (ep > 1 and model.moe is None):
                continue
            for method in CP_METHODS if cp > 1 else CP_METHODS[:1]:
                layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, cp_method=method)
                for schedule in (*SCHEDULES, "overlapped"):
                    base = Base(model, layout, schedule)
                    if (schedule != "overlapped" or pp == 1) and legal(base.case(_first(base))):
                        yield base


def _first(base: Base) -> dict[str, Any]:
    return {name: values[0] for name, values in base.options().items()}


def _pairs(facts: list[tuple[str, Any]], choice: Choice) -> set[Pair]:
    """Those that hold an option: the rest is covered in full."""
    return {frozenset(two) for two in combinations(facts, 2) if any(name in choice for name, _ in two)}


@dataclass
class Coverage:
    """Pairs that cases had so far."""

    covered: set[Pair] = field(default_factory=set)

    def choose(self, base: Base, draw: random.Random) -> Choice:
        """Of a few candidates, the legal one with the most new pairs."""
        options = base.options()
        candidates = [{n: draw.choice(values) for n, values in options.items()} for _ in range(CANDIDATES)]
        fit = [c for c in [*candidates, _first(base)] if legal(base.case(c))]  # once all are covered, any: a drawn one
        best = max(fit, key=lambda c: len(_pairs(base.facts(c), c) - self.covered))
        self.covered |= _pairs(base.facts(best), best)
        return best


def possible_pairs() -> set[Pair]:
    """Pairs that some case could have."""
    found: set[Pair] = set()
    for base in bases():
        options = base.options()
        fixed = [f for f in base.facts({}) if f[0] not in options]
        values = [[(n, v) for v in vs] for n, vs in options.items()]
        for one, other in combinations([*values, *([f] for f in fixed)], 2):
            found |= {frozenset(p) for p in product(one, other) if any(n in options for n, _ in p)}
    return found


def sweep() -> tuple[list[Case], Coverage]:
    """All cases, the same on every call."""
    coverage, draw = Coverage(), random.Random(0)
    return [base.case(coverage.choose(base, draw)) for base in bases()], coverage

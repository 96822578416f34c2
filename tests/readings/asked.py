"""Layouts in any order, and all that an estimator answers of each: what it was asked before must not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

from penteract.config.hardware import cluster
from penteract.config.layout import ATTENTION_KERNELS, CP_METHODS, ELEMENTWISE, LOSS_KERNELS, Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.resolve.presets import TINY, TINY_LATENT, TINY_MOE
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.readings.estimator import Estimator
from penteract.schedule.registry import SCHEDULES

WORLD = 16
LENGTH = 128  # tokens of a sequence
LARGEST = 8  # sequences of a micro-batch that rough bounds look at
RECOMPUTES = (
    ("tp_all_gather",),
    (),
    ("*",),
    ("tp_all_gather", "swiglu"),
    ("tp_all_gather", "rms_norm", "swiglu"),
    ("attention", "linear"),
)
OFFLOADS = ((), (), ("layer_inputs",), ("*",), ("swiglu", "linear"))


@dataclass(frozen=True)
class Asking:
    """What an estimator is made of, beside 2 nodes of 8 H100."""

    model: ModelSpec
    precision: Policy = RECIPES["bf16"]
    optimizer_kinds: OptimizerKinds = PLAIN

    def estimator(self) -> Estimator:
        return Estimator(self.model, cluster("2x8xH100"), LENGTH, self.precision, self.optimizer_kinds)


_MUON = OptimizerKinds(matrices=OptimizerKind("muon", 3))
_BY_NAME = replace(RECIPES["bf16"], moments="int8", modules=(Pattern.of("layers.0.*:moments=bf16"),))
ASKINGS = {
    "tied": Asking(replace(TINY, layers=6, tied=True), optimizer_kinds=_MUON),
    "experts": Asking(replace(TINY_MOE, layers=6), _BY_NAME),
    "ahead": Asking(replace(TINY_LATENT, layers=5)),
    "fp8": Asking(replace(TINY, layers=6), RECIPES["fp8_rowwise"]),
}

# Fields that are drawn together, as one decides what another may be.
_TOGETHER = (
    ("dp", "tp", "pp", "cp", "ep", "expert_tp", "schedule", "vpp", "cp_method", "gradient_accumulation_steps"),
    ("schedule", "vpp", "gradient_accumulation_steps"),
    ("cp_method",), ("ep", "expert_tp"), ("micro_batch_size",), ("gradient_accumulation_steps",),
    ("zero", "shard_group", "reduce_scatter_once", "reshard_after_step"), ("shard_group",),
    ("recompute",), ("recompute_every", "recompute_first", "recompute_else"), ("offload", "offload_every"),
    ("offload_optimizer",),
    ("attention",), ("loss", "loss_chunk"), ("loss",), ("elementwise",), ("bucket_bytes",),
)  # fmt: skip


def drawn_layouts(asking: Asking, count: int, seed: int) -> list[Layout]:
    """So many legal layouts, each once, shuffled. Half of them differ from another in few fields: where a cache leaves
    one out, such a pair shows it."""
    random, found = Random(seed), dict[Layout, None]()
    while len(found) < count:
        layout = Layout(**_fields(random, asking.model))
        if found and random.random() < 0.5:
            near = random.choice([*found])
            layout = replace(near, **{name: getattr(layout, name) for name in random.choice(_TOGETHER)})
        if not breaches(Case(model=asking.model, layout=layout, sequence_length=LENGTH)):
            found[layout] = None
    every = [*found]
    random.shuffle(every)
    return every


def _fields(random: Random, model: ModelSpec) -> dict[str, Any]:
    """Of any layout of `WORLD` ranks, nearly always a legal one."""
    tp, pp, cp = (random.choice((1, 1, 2, 2, 4)) for _ in range(3))
    while WORLD % (tp * pp * cp):
        cp //= 2
    rows, some = WORLD // (tp * pp), model.moe is not None
    schedule = random.choice(tuple(SCHEDULES) if pp > 1 else ("1f1b", "gpipe", "zb_h1"))
    vpp = {"interleaved": 2, "gpipe": random.choice((1, 2))}.get(schedule, 1) if 2 * pp <= model.layers else 1
    zero = random.choice((0, 1, 2, 2, 3, 3))
    whole, gathered = (random.random() < 0.3 if zero == 3 else False for _ in range(2))
    return {
        "dp": rows // cp, "tp": tp, "pp": pp, "cp": cp, "ep": random.choice((1, 2, 4)) if some else 1,
        "expert_tp": random.choice((1, tp)) if some else 1, "vpp": vpp,
        "schedule": schedule if vpp > 1 or schedule != "interleaved" else "1f1b",
        "cp_method": random.choice(CP_METHODS) if cp > 1 else "all_gather",
        "micro_batch_size": random.choice((1, 2, 4)), "gradient_accumulation_steps": pp * random.choice((1, 2, 5)),
        "zero": zero, "shard_group": random.choice((0, 0, 2, 4)) if zero else 0,
        "reduce_scatter_once": whole, "reshard_after_step": gathered,
        "recompute": random.choice(RECOMPUTES), "recompute_else": random.choice(RECOMPUTES),
        "recompute_every": random.choice((1, 1, 1, 2)), "recompute_first": random.choice((0, 0, 0, 1)),
        "offload": random.choice(OFFLOADS), "offload_every": random.choice((1, 2)),
        "offload_optimizer": random.random() < 0.3,
        "attention": random.choice(ATTENTION_KERNELS), "loss": random.choice(LOSS_KERNELS),
        "loss_chunk": random.choice((0, 0, 32, 48)), "elementwise": random.choice(ELEMENTWISE),
        "bucket_bytes": random.choice((25 * 2**20, 2**16, 0)),
    }  # fmt: skip


def answers(estimator: Estimator, layout: Layout) -> dict[str, Any]:
    """All that a search asks of a layout."""
    estimate = estimator.estimate(layout)
    return {
        "estimate": estimate, "time": estimator.time(estimate), "floor": estimator.floor(layout),
        "bound": estimator.bounds.of(layout), "at_least": estimator.bounds.at_least(layout),
        "roughly": estimator.bounds.roughly(layout, LARGEST, estimator.bounds.quickest(layout, LARGEST)),
        "recomputed_flops": estimator.recomputed_flops(layout),
        "ranks": [estimator.composer.rank(layout, r) for r in range(layout.pp)],
    }  # fmt: skip


def unlike(asking: Asking, layouts: list[Layout]) -> Iterator[tuple[Layout, list[str]]]:
    """Layouts of which an estimator that is asked one after the other answers otherwise than a fresh one, and where."""
    used = asking.estimator()
    for layout in layouts:
        now, fresh = answers(used, layout), answers(asking.estimator(), layout)
        if wrong := [name for name, value in fresh.items() if now[name] != value]:
            yield layout, wrong


assert prod((2, 8)) == WORLD

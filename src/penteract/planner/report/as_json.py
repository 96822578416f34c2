"""A plan as JSON, and the rates of its layouts: tokens a second, model FLOPs utilisation, GPU-hours and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.model.count import parameters
from penteract.planner.ask import Ask, as_settings
from penteract.planner.plan import Plan
from penteract.planner.report.explain import unlisted
from penteract.planner.report.host_room import HostRoom, crowded
from penteract.planner.search.best import Timed
from penteract.units import gib

SCHEMA_VERSION = 1
MEMORY = ("parameters", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Fractions of the GPU's dense peak in the compute dtype; None if the cluster names no GPU. With FP8 it is the peak
    of bf16: only linear layers are faster, so the fraction can be above 1.

    mfu         matmul parameters (no embedding lookup) and full attention: the Playbook's convention
    mfu_causal  the same, with the half of attention that a causal mask leaves
    hfu         mfu with recomputation
    """

    mfu: float | None
    mfu_causal: float | None
    hfu: float | None


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """The cost of a whole training at the speed of one layout."""

    tokens: int
    gpu_hours: float
    days: float
    usd: float | None


def utilisation(plan: Plan, timed: Timed) -> Utilisation:
    """How much of the peak a layout's step uses."""
    gpu = plan.ask.cluster.gpu
    if gpu is None:
        return Utilisation(None, None, None)
    flops = plan.estimator.model_flops(plan.ask.tokens)
    peak = timed.time.seconds * timed.layout.world * gpu.peak(timed.estimate.precision.products)
    recomputed = plan.search.estimators[timed.estimate.precision].recomputed_flops(timed.layout)
    return Utilisation(flops.full / peak, flops.causal / peak, (flops.full + recomputed) / peak)


def budget(plan: Plan, timed: Timed, tokens: int, usd_per_gpu_hour: float | None) -> TrainingCost:
    """GPU-hours, days and cost of `tokens`, without pauses and failures."""
    hours = tokens / plan.rate(timed) / 3600
    usd = None if usd_per_gpu_hour is None else hours * usd_per_gpu_hour
    return TrainingCost(tokens, hours, hours / timed.layout.world / 24, usd)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as a dict for JSON: schema 1. Memory in GiB, times in seconds."""
    counts, ask = plan.counts, plan.ask
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": plan.complete,
        "model": _model(ask),
        "cluster": _cluster(ask),
        "step": {
            "sequence_length": ask.sequence_length, "global_batch_size": ask.global_batch_size, "tokens": ask.tokens,
            "precision": ask.precision.name, "precisions": [one.precision.name for one in ask.each],
            "optimizer": ask.optimizer,
        },
        "counts": {
            "enumerated": counts.enumerated, "refused": dict(counts.refused), "fit": counts.fit,
            "priced": counts.priced, "simulated": counts.simulated, "recompute_between": asdict(counts.between),
        },
        "notes": [note for note in (*plan.notes, crowded(plan)) if note],
        "packages": list(plan.packages),
        "not_tried": list(plan.not_tried),
        "layouts": [entry(plan, timed) for timed in plan.layouts],
        "unlisted_precisions": [
            {"precision": own.name, "best": best and entry(plan, best)} for own, best in unlisted(plan)
        ],
        "nearest_misses": [_miss(plan, estimate) for estimate in plan.misses()] if not counts.fit else [],
        "larger": plan.larger and {"cluster": plan.larger[0].name, **_miss(plan, plan.larger[1])},
        "basis": dict(plan.estimator.basis),
    }  # fmt: skip


def entry(plan: Plan, timed: Timed) -> dict[str, Any]:
    """One layout of the list."""
    used = utilisation(plan, timed)
    return {
        **_layout(timed.layout, timed.estimate.precision),
        "memory": memory(timed.estimate.memory, timed.estimate.allocated)
        | {"by_pp_rank_gib": [gib(size) for size in timed.estimate.by_pp_rank]},
        "time": {"step_s": timed.time.seconds, "at_least_s": timed.estimate.at_least}
        | {f"{part}_s": seconds for part, seconds in timed.time.parts.items()},
        "tokens_per_s_per_gpu": plan.rate(timed),
        "mfu": used.mfu,
        "mfu_causal": used.mfu_causal,
        "hfu": used.hfu,
        "limited_by": timed.time.limited_by,
        **_host(plan, timed),
    }


def _host(plan: Plan, timed: Timed) -> dict[str, Any]:
    """Of each host, where its memory is known."""
    host = HostRoom.of(plan, timed)
    if not host.has:
        return {}
    sizes = {"offloaded_gib": host.offloaded, "background_save_gib": host.copied, "memory_gib": host.has}
    return {"host": {name: gib(n) for name, n in sizes.items()} | {"saves_in_background": host.saves_in_background}}


def _layout(layout: Layout, precision: Policy) -> dict[str, Any]:
    """`layout` has the keys of `--layout`; the accumulation steps follow from the batch."""
    return {
        "layout": as_settings(layout),
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "precision": precision.name,
    }


def memory(kinds: Mapping[str, int], allocated: int) -> dict[str, Any]:
    """GiB by kind, and their sum."""
    return {f"{kind}_gib": gib(kinds.get(kind, 0)) for kind in MEMORY} | {"allocated_gib": gib(allocated)}


def _miss(plan: Plan, estimate: Any) -> dict[str, Any]:
    over = gib(estimate.allocated - plan.ask.usable)
    named = _layout(estimate.layout, estimate.precision)
    return named | {"memory": memory(estimate.memory, estimate.allocated), "over_gib": over}


def _model(ask: Ask) -> dict[str, Any]:
    m, counted = ask.model, parameters(ask.model)
    shape = ("layers", "hidden_size", "heads", "kv_heads", "vocab_size")
    return {
        "name": m.name,
        "parameters": counted.total,
        "active_parameters": counted.active,
        **{name: getattr(m, name) for name in shape},
    }


def _cluster(ask: Ask) -> dict[str, Any]:
    c = ask.cluster
    return {"name": c.name, "gpu": c.gpu.name if c.gpu else None, "gpus": c.gpus, "gpus_per_node": c.gpus_per_node,
            "memory_gib": c.memory_gib, "headroom": ask.headroom, "usable_gib": gib(ask.usable)} | (
                {"imbalance": ask.imbalance} if ask.imbalance != 1 else {})  # fmt: skip

"""Changes of one layout that may make it smaller, in groups: of the same step, of the training, of the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from penteract.config.catalog.hardware import tables
from penteract.config.layout import Layout
from penteract.config.rules.case import KEYS
from penteract.errors import BadInput
from penteract.planner.ask import as_settings, as_word
from penteract.planner.plan import Plan, estimator, plan_one

Changes = Mapping[str, Any]  # settings of a layout, and other keys of a question, with their new values


def same_step(plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """What is sharded, recomputed, taken at a time, offloaded; then the mesh."""
    if lay.rows > 1:
        yield from ((f"ZeRO {stage}", {"zero": stage}) for stage in range(lay.zero + 1, 4))
    if lay.recompute != ("*",):
        yield "recompute norms and activation", {"recompute": "tp_all_gather+rms_norm+swiglu"}
        yield "recompute all", {"recompute": "full"}
    if lay.recompute and (lay.recompute_every > 1 or lay.recompute_first):
        yield "recompute in all layers", {"recompute_every": 1, "recompute_first": 0}
    size = lay.micro_batch_size
    while (size := size // 2) > 0:
        yield f"micro-batch {size}", {"micro_batch_size": size}
    if lay.loss != "chunked":
        yield "loss in chunks", {"loss": "chunked"}
    if lay.pads_rows:
        yield "exact rows of experts", {"expert_rows": "exact"}
    if not lay.offload_optimizer:
        yield "optimizer on the host", {"offload_optimizer": True}
    if lay.recompute == ("*",) and not lay.offload:
        yield "inputs of layers on the host", {"offload": "layer_inputs"}
    for axis in ("tp", "pp", "cp") if lay.dp % 2 == 0 else ():  # two ranks of dp become two of another dimension
        degree: int = 2 * getattr(lay, axis)
        yield f"{axis} {degree}, dp {lay.dp // 2}", {axis: degree, "dp": lay.dp // 2}
    if plan.ask.model.moe:
        ep = 2 * lay.ep
        yield f"ep {ep}", {"ep": ep, "ep_method": plan.ask.ep_method(ep)}


def other_step(plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """What changes the training: precision, and shorter sequences."""
    if plan.ask.precision.moments == "fp32" and plan.ask.precision.compute in ("bf16", "fp16"):
        yield "moments in int8", {"parts.moments": "int8"}
    if (half := plan.ask.sequence_length // 2) > 0:
        yield f"sequences of {half}", {"sequence_length": half}


def other_gpus(plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """Twice as many, and the next larger ones of the catalogue."""
    for axis in ("dp", "tp", "pp"):
        degree: int = 2 * getattr(lay, axis)
        yield f"{axis} {degree}, on {2 * lay.world} GPUs", {axis: degree}
    now = plan.ask.cluster.memory_gib
    larger = sorted((row["memory_gib"], name) for name, row in tables("gpus").items() if row["memory_gib"] > 1.05 * now)
    yield from ((f"on {name}", {"gpu": name}) for _, name in larger[:2])


def by_search(plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """The cheapest recomputation that keeps half of the activations: a search by itself, so it comes last."""
    if lay.recompute != ("*",):
        yield "keep half of the activations", {"recompute": "budget:0.5"}


_Candidates = Callable[[Plan, Layout], Iterator[tuple[str, Changes]]]
_SAME = "The same step on the same GPUs"
GROUPS: tuple[tuple[str, _Candidates], ...] = (
    (_SAME, same_step),
    ("Another training on the same GPUs", other_step),
    ("The same step on other GPUs", other_gpus),
    (_SAME, by_search),
)


class SmallerLayout(NamedTuple):
    """A change with what it needs, and the share of a step that it costs; negative: it gains. `keys`: the change as
    options of `train`."""

    what: str
    keys: str
    allocated: int
    price: float


def smaller(plan: Plan, most: int) -> list[SmallerLayout]:
    """The changes of the plan's best layout that leave the step and the GPUs as they are, and need at most `most`
    bytes; the cheapest first. Where none is enough, two at once."""
    ones = [*same_step(plan, plan.best.layout)]
    pairs = (
        (f"{what} and {other}", {**changes, **more})
        for (what, changes), (other, more) in combinations(ones, 2)
        if not changes.keys() & more.keys()
    )
    return _that_fit(plan, ones, most) or _that_fit(plan, pairs, most)


def _that_fit(plan: Plan, candidates: Iterable[tuple[str, Changes]], most: int) -> list[SmallerLayout]:
    own, before = as_settings(plan.best.layout), plan.best.time.seconds
    found = list[SmallerLayout]()
    for what, changes in candidates:
        try:
            other = plan_one(
                plan.ask, {setting: (value,) for setting, value in {**own, **changes}.items()}, estimator
            ).best
        except BadInput:
            continue
        if (need := other.estimate.allocated) <= most:
            found.append(SmallerLayout(what, _as_options(changes), need, other.time.seconds / before - 1))
    return sorted(found, key=lambda one: one.price)


def _as_options(changes: Changes) -> str:
    return " ".join(f"--{KEYS[setting]} {as_word(value).replace('+', ',')}" for setting, value in changes.items())

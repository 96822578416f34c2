"""Changes of one layout, each priced by itself: what would make it fit, or leave more room, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penteract.config.catalog.hardware import tables
from penteract.config.layout import Layout
from penteract.errors import BadInput
from penteract.explore.answers.amounts import amount, change, difference
from penteract.explore.answers.questions import changed, read_question
from penteract.explore.page_schema import VERSION, FitAnswer, FitsEnd, Question
from penteract.planner.ask import as_axes, budget_of
from penteract.planner.plan import Plan, estimator, plan_one
from penteract.planner.search.best import Timed

Changes = Mapping[str, Any]
_PLAIN = {"recompute": "none", "recompute_every": 1, "recompute_first": 0, "recompute_else": "none"}


def would_fit(page: Question, plan: Plan, timed: Timed) -> Iterator[FitAnswer | FitsEnd]:
    """Each change as soon as it is priced; last, how many there were."""
    tried = refused = fit = 0
    for group, changes_of_group in GROUPS:
        for text, changes in changes_of_group(page, plan, timed.layout):
            if (other := changed(page, changes)) == page:
                continue
            tried += 1
            try:
                asked = read_question(other)
                found = plan_one(asked.ask, asked.axes, estimator)
            except BadInput:
                refused += 1
                continue
            if budget_of(str(changes.get("recompute", ""))):
                other = changed(
                    page, {axis: as_axes(found.best.layout).get(axis, plain) for axis, plain in _PLAIN.items()}
                )
            answer = _answer(group, text, other, found, timed)
            fit += answer["fits"]
            yield answer
    text = f"{tried} changes were tried: {fit} fit, {tried - refused - fit} do not, {refused} cannot be"
    yield {"version": VERSION, "kind": "fits_end", "tried": tried, "refused": refused, "text": text}


def _same_step(page: Question, plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """What is sharded, recomputed, taken at a time, offloaded; then the mesh."""
    if lay.rows > 1:
        yield from ((f"ZeRO {stage}", {"zero": stage}) for stage in range(lay.zero + 1, 4))
    if lay.recompute != ("*",):
        yield "recompute norms and activation", {"recompute": "tp_all_gather+rms_norm+swiglu"}
        yield "recompute all", {"recompute": "full"}
    if lay.micro_batch_size > 1:
        yield f"micro-batch {lay.micro_batch_size // 2}", {"micro_batch_size": lay.micro_batch_size // 2}
    if lay.loss != "chunked":
        yield "loss in chunks", {"loss": "chunked"}
    if not lay.offload_optimizer:
        yield "optimizer on the host", {"offload_optimizer": True}
    if lay.recompute == ("*",) and not lay.offload:
        yield "inputs of layers on the host", {"offload": "layer_inputs"}
    for axis in ("tp", "pp", "cp") if lay.dp % 2 == 0 else ():  # two ranks of dp become two of another dimension
        degree: int = 2 * getattr(lay, axis)
        yield f"{axis} {degree}, dp {lay.dp // 2}", {axis: degree, "dp": lay.dp // 2}
    if plan.ask.model.moe:
        yield f"ep {2 * lay.ep}", {"ep": 2 * lay.ep}


def _other_step(page: Question, plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """What changes the training: precision, and shorter sequences."""
    if plan.ask.precision.moments == "fp32" and plan.ask.precision.compute in ("bf16", "fp16"):
        yield "moments in int8", {"parts.moments": "int8"}
    if (half := page["sequence_length"] // 2) > 0:
        yield f"sequences of {half}", {"sequence_length": half}


def _other_gpus(page: Question, plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """Twice as many, and the next larger ones of the catalogue."""
    for axis in ("dp", "tp", "pp"):
        degree: int = 2 * getattr(lay, axis)
        yield f"{axis} {degree}, on {2 * lay.world} GPUs", {axis: degree}
    now = plan.ask.cluster.memory_gib
    larger = sorted((row["memory_gib"], name) for name, row in tables("gpus").items() if row["memory_gib"] > 1.05 * now)
    yield from ((f"on {name}", {"gpu": name}) for _, name in larger[:2])


def _by_search(page: Question, plan: Plan, lay: Layout) -> Iterator[tuple[str, Changes]]:
    """The cheapest recomputation that keeps half of the activations: a search by itself, so it comes last."""
    if lay.recompute != ("*",):
        yield "keep half of the activations", {"recompute": "budget:0.5"}


_Candidates = Callable[[Question, Plan, Layout], Iterator[tuple[str, Changes]]]
_SAME = "The same step on the same GPUs"
GROUPS: tuple[tuple[str, _Candidates], ...] = (
    (_SAME, _same_step),
    ("Another training on the same GPUs", _other_step),
    ("The same step on other GPUs", _other_gpus),
    (_SAME, _by_search),
)


def _answer(group: str, text: str, page: Question, found: Plan, before: Timed) -> FitAnswer:
    timed = found.best
    size, seconds = timed.estimate.allocated, timed.time.seconds
    was = before.time.seconds
    return {
        "version": VERSION, "kind": "fit", "group": group, "text": text, "fits": found.fits(timed.estimate),
        "amount": amount(size),        "memory": change(size - before.estimate.allocated), "seconds": seconds,
        "time": difference(seconds, was), "question": page,
    }  # fmt: skip

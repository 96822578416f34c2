"""What the page draws of a layout's memory: the rows of one rank by owner, each distinct rank, and the card's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import cast

from penteract.explore.amounts import amount, bytes_axis, card_of, share
from penteract.explore.answers.glossary import TERMS
from penteract.explore.schemas.page_schema import Fact, Figures, HeldAmount, MemoryBlock, Owner, RankGroup, SourceLines
from penteract.ops.expression import LEGEND
from penteract.planner.plan import Plan
from penteract.planner.report.as_json import MEMORY, utilisation
from penteract.planner.report.as_text import headline, packages_needed_by
from penteract.planner.report.memory_by_line import fullest_pp_rank
from penteract.planner.search.best import Timed
from penteract.readings.composed import RankPrice
from penteract.readings.explain.terms import PART_OF, Term, Why
from penteract.units import GIB, Bytes, show_bytes, show_flops, show_step, show_whole

_LABELS: Mapping[str, str] = {
    "parameters": "Parameters", "gradients": "Gradients", "optimizer": "Optimizer", "activations": "Activations",
    "other": "Other",
}  # fmt: skip
_AROUND = 3  # lines of code before and after the one meant
_SOURCES = Path(__file__).parents[2]


def figures(plan: Plan, timed: Timed, at: int, rows: Why) -> Figures:
    """The figures of a priced layout, with the `rows` of the rank at pipeline coordinate `at`."""
    ask, estimate = plan.ask, timed.estimate
    prices = [_price(plan, timed, s) for s in range(timed.layout.pp)]
    axis, drawn = bytes_axis(max(estimate.by_pp_rank), int(ask.cluster.memory_gib * GIB))
    total = estimate.by_pp_rank[at]
    shown = [row for row in rows.rows if row.kind not in ("flops", "wires", "host")]
    used = {name for row in shown for name in row.names}
    return {
        "headline": headline(plan),
        "fits": plan.fits(estimate),
        "verdict": _verdict(plan, timed),
        "total": amount(total),
        "facts": _facts(plan, timed, rows),
        "pp_rank": at,
        "rank_label": rank_label(timed, at),
        "owners": owners(prices[at], shown, total),
        "card": card_of(ask, drawn=drawn),
        "axis": axis,
        "ranks": _ranks(plan, timed, prices, at),
        "legend": {name: f"{rows.numbers[name]}, {LEGEND[name]}" for name in LEGEND if name in used},
        "sources": {line: found for line in sorted({r.line for r in shown}) if (found := source_lines(line))},
        "notes": [*plan.notes, *packages_needed_by(plan)],
    }


def _price(plan: Plan, timed: Timed, pp_rank: int) -> RankPrice:
    return plan.search.estimators[timed.estimate.precision].composer.rank(timed.layout, pp_rank)


def by_owner(price: RankPrice) -> dict[str, Bytes]:
    """Bytes of a rank by owner, under the names of `penteract plan --json`."""
    kept = {name: price.resident.get(name, 0) for name in ("parameters", "gradients", "optimizer")}
    rest = {name: n for name, n in price.resident.items() if name not in kept}
    return {**kept, "activations": price.arena + price.routed, "other": sum(rest.values()) + price.workspace}


def owners(price: RankPrice, rows: Sequence[Term], total: Bytes) -> list[Owner]:
    """The owners of a rank's memory, with their rows."""
    sizes = by_owner(price)
    return [
        {
            "name": name, "label": _LABELS[name], "about": TERMS[name], "amount": amount(sizes[name]),
            "share": share(sizes[name], total),
            "blocks": [_block(row, total) for row in sorted(rows, key=lambda r: -r.value) if _owner(row) == name],
        }
        for name in MEMORY
    ]  # fmt: skip


def held(price: RankPrice) -> list[HeldAmount]:
    """What a rank holds for the whole step: all but activations and workspace."""
    sizes = by_owner(price)
    sizes["other"] -= price.workspace
    return [
        {"name": name, "label": _LABELS[name], "amount": amount(sizes[name])}
        for name in MEMORY
        if name != "activations"
    ]


def _owner(row: Term) -> str:
    return PART_OF.get(row.kind, row.kind)


def _block(row: Term, total: Bytes) -> MemoryBlock:
    times = f"{row.count} × " * (row.count > 1) + f"{row.flight} in flight × " * (row.flight > 1)
    return {
        "what": row.what, "detail": row.detail, "amount": amount(row.value), "share": share(row.value, total),
        "formula": row.formula, "numbers": row.numbers, "times": times, "line": row.line,
    }  # fmt: skip


def _verdict(plan: Plan, timed: Timed) -> str:
    need, usable = timed.estimate.allocated, plan.ask.usable
    left = show_bytes(abs(usable - need))
    if plan.fits(timed.estimate):
        return f"Fits: the fullest rank takes {show_bytes(need)} of {show_bytes(usable)}, {left} are left."
    return f"Does not fit: the fullest rank takes {show_bytes(need)} of {show_bytes(usable)}, {left} too many."


def _facts(plan: Plan, timed: Timed, rows: Why) -> list[Fact]:
    """The headline's numbers besides memory."""
    used, lay = utilisation(plan, timed), timed.layout
    exact, modelled = "counted from the recorded program", "simulated with measured rates"
    facts: list[Fact] = [
        {"label": "GPUs", "text": show_whole(lay.world), "source": "dp · tp · pp · cp"},
        {"label": "Micro-batches a step", "text": show_whole(lay.gradient_accumulation_steps),
         "source": "batch ÷ (dp · micro-batch)"},
        {"label": "Step", "text": show_step(timed.time.seconds), "source": modelled},
        {"label": "Tokens/s/GPU", "text": show_whole(plan.rate(timed)), "source": modelled},
    ]  # fmt: skip
    if used.mfu is not None:
        facts.append({"label": "MFU", "text": f"{used.mfu:.1%}", "source": "full attention, matmul parameters"})
    if host := rows.total("host"):
        facts.append({"label": "On the host", "text": show_bytes(host), "source": exact})
    elif timed.estimate.host:
        facts.append({"label": "On the host", "text": show_bytes(timed.estimate.host), "source": exact})
    flops = plan.estimator.model_flops(plan.ask.tokens).full
    facts.append({"label": "Model FLOPs a step", "text": show_flops(int(flops)), "source": exact})
    return facts


def rank_label(timed: Timed, pp_rank: int) -> str:
    """What the ranks at a pipeline coordinate are called."""
    lay, fullest = timed.layout, fullest_pp_rank(timed)
    if lay.pp == 1:
        return "every rank" if lay.world > 1 else "the rank"
    return f"pipeline rank {pp_rank}" + " (the fullest)" * (pp_rank == fullest)


def _ranks(plan: Plan, timed: Timed, prices: Sequence[RankPrice], shown: int) -> list[RankGroup]:
    """Neighbouring pipeline ranks with the same memory are one group."""
    lay, usable, found = timed.layout, plan.ask.usable, list[RankGroup]()
    sizes = [by_owner(price) for price in prices]
    for _, group in groupby(range(lay.pp), key=lambda s: tuple(sizes[s].values())):
        pp_ranks = list(group)
        first, total = pp_ranks[0], sum(sizes[pp_ranks[0]].values())
        span = f"{first}" if len(pp_ranks) == 1 else f"{first}–{pp_ranks[-1]}"
        gpus = lay.world // lay.pp * len(pp_ranks)
        found.append({
            "label": "all ranks" if len(pp_ranks) == lay.pp else f"pipeline rank{'s' * (len(pp_ranks) > 1)} {span}",
            "gpus": f"{show_whole(gpus)} GPU{'s' * (gpus > 1)}", "pp_ranks": pp_ranks, "amount": amount(total),
            "owners": [amount(sizes[first][name]) for name in MEMORY],
            "fits": not usable or total <= usable, "shown": shown in pp_ranks,
        })  # fmt: skip
    return found


@cache
def _file(name: str) -> tuple[str, ...]:
    path = (_SOURCES / name).resolve()
    inside = path.is_relative_to(_SOURCES.resolve()) and path.suffix == ".py" and path.is_file()
    return tuple(path.read_text(encoding="utf-8").splitlines()) if inside else ()


def source_lines(line: str) -> SourceLines | None:
    """The lines around "model/mlp.py:17"; None for a file alone, or if there is no such line."""
    name, colon, number = line.rpartition(":")
    if not colon or not number.isdigit() or not (lines := _file(name)):
        return None
    at = int(number)
    first = max(1, at - _AROUND)
    return cast("SourceLines", {"first": first, "line": at, "lines": list(lines[first - 1 : at + _AROUND])})

"""A profile as lines of a terminal: the verdict first, then the ops, ranks and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penteract.measure.schemas.profile import Advice, MeasuredMemory, OpRow, ProfileFile, WaterfallRow
from penteract.planner.plan import SHARED_CPU
from penteract.units import show_bytes, show_step

_PS = 10**12
_MOST_OPS, _MOST_LIVE, _BAR = 25, 6, 24


def as_text(profile: ProfileFile, *, every: bool = False) -> str:
    """The whole report. `every`: all ops, not only those that take longest."""
    return "\n".join(_lines(profile, every=every))


def _lines(profile: ProfileFile, *, every: bool) -> Iterator[str]:
    run, step, basis = profile["run"], profile["step"], profile["basis"]
    ranks = f"{run['world']} rank{'s' * (run['world'] > 1)}"
    yield f"{run['model']} · {run['text']} · {ranks} · {profile['made']['device']}"
    spread = f"{show(min(step['bare']))} to {show(max(step['bare']))}"
    yield f"A step takes {show(step['measured'])} (median of {len(step['bare'])}, {spread}); under the profiler " + (
        f"{step['slowdown']:.2f} times as long."
    )
    yield f"Predicted: {show(step['predicted'])}, from {basis['about']}."
    if profile["made"]["device"] == "CPU" and run["world"] > 1:
        yield f"Note: {SHARED_CPU}."
    yield ""
    yield from waterfall_lines(profile["waterfall"])
    yield "Below Predicted: what each part took beyond its prediction."
    yield ""
    yield from advice_lines(profile)
    yield ""
    yield from _op_lines(profile["ops"], every=every)
    found = profile["unmatched"]
    yield f"Unmatched: measured alone {found['measured_share']:.1%} of the measured step, predicted alone " + (
        f"{found['predicted_share']:.1%} of the predicted one."
    )
    yield from _rank_lines(profile)
    yield from _memory_lines(profile["memory"])


def show(picoseconds: int, sign: str = "") -> str:
    """A time for people."""
    return show_step(picoseconds / _PS, sign).replace("-", "−")


def waterfall_lines(rows: Sequence[WaterfallRow]) -> Iterator[str]:
    """The verdict: levels, and what lies between them."""
    width, at, whole = max(len(row["label"]) for row in rows) + 2, 0, max(1, *(row["picoseconds"] for row in rows))
    for row in rows:
        size = row["picoseconds"]
        begin, end = (0, size) if row["level"] else (min(at, at + size), max(at, at + size))
        at = size if row["level"] else at + size
        left, right = (max(0, round(_BAR * x / whole)) for x in (begin, end))
        bar = " " * left + ("█" if row["level"] else "▒") * max(right - left, int(end > begin))
        label = row["label"] if row["level"] else f"  {row['label']}"
        yield f"{label:<{width}} {show(size, '' if row['level'] else '+'):>9} {row['share']:>7.1%}  {bar}".rstrip()


def advice_lines(profile: ProfileFile) -> Iterator[str]:
    """The largest win with its price, and further ones."""
    for i, one in enumerate(profile["advice"]):
        begin = "Largest win" if i == 0 else "Then"
        share = one["gain"] / profile["step"]["measured"]
        yield f"{begin}: {one['what']}, {show(one['gain'])} of a step ({share:.0%}); {price_of(one)}"
    if not profile["advice"]:
        yield "Nothing gains more than 1% of a step."


def price_of(one: Advice) -> str:
    """What an advice takes, or where its time is."""
    return f"price: {one['price']}" if one["kind"] == "layout" else one["price"]


def _op_lines(ops: Sequence[OpRow], *, every: bool) -> Iterator[str]:
    pp_ranks = sorted({row["pp_rank"] for row in ops})
    for pp_rank in pp_ranks:
        own = [row for row in ops if row["pp_rank"] == pp_rank]
        least = (
            0 if every or len(own) <= _MOST_OPS else sorted((r["measured"] for r in own), reverse=True)[_MOST_OPS - 1]
        )
        shown = [row for row in own if row["measured"] >= least or (every and row["predicted"])]
        where = f"pipeline rank {pp_rank}, rank {own[0]['rank']}" if len(pp_ranks) > 1 else f"rank {own[0]['rank']}"
        note = "" if len(shown) == len(own) else f" ({len(shown)} of {len(own)} that take longest; --all shows each)"
        yield f"Ops in the order of a step, {where}{note}:"
        head = f"{'':<52} {'calls':>5} {'predicted':>10} {'measured':>10} {'share':>6}   {'of ceiling':>10}"
        yield f"{head}   ranks"
        for row in shown:
            yield op_line(row)


def op_line(row: OpRow) -> str:
    """One row of ops."""
    reached = f"{row['reached']:.0%}" if row["reached"] else ""
    skew = f"{show(row['least'])} to {show(row['most'])} (rank {row['slowest']})" if row["least"] < row["most"] else ""
    mark = {"both": "", "predicted": "  unmatched: not measured", "measured": "  unmatched: not predicted"}
    return (f"{row['name'][:52]:<52} {row['calls']:>5} {show(row['predicted']):>10} {show(row['measured']):>10} "
            f"{row['share']:>6.1%}   {reached:>10}   {skew}{mark[row['matched']]}").rstrip()  # fmt: skip


def _rank_lines(profile: ProfileFile) -> Iterator[str]:
    if len(profile["ranks"]) < 2:
        return
    yield ""
    yield "Ranks, of the profiled steps:"
    work = [row["work"] for row in profile["ranks"]]
    for row in profile["ranks"]:
        note = "  the most work" if row["work"] == max(work) else ""
        works, waits = show(row["work"]), show(row["waits"])
        yield f"  rank {row['rank']:<4} pipeline rank {row['pp_rank']}  works {works:>9}  waits {waits:>9}{note}"


def _memory_lines(memory: Sequence[MeasuredMemory]) -> Iterator[str]:
    fullest = max(memory, key=lambda row: row["peak"])
    ways = {"storages": "counted", "allocator": "by the allocator's history"}[fullest["basis"]]
    yield ""
    peak, planned = show_bytes(fullest["peak"]), show_bytes(fullest["predicted"])
    yield f"Memory of rank {fullest['rank']}, the fullest: {peak} at {fullest['at']} ({ways}); planned {planned}"
    yield "  Here each tensor has memory of its own, to see its owner. A run puts all into one planned block, with"
    yield "  gaps: train reports that"
    for owner, size in sorted(fullest["owners"].items(), key=lambda item: -item[1]):
        yield f"  {owner:<20} {show_bytes(size):>12} {size / fullest['peak']:>6.1%}"
    for owner, size in fullest["process"].items():
        yield f"  {owner:<20} {show_bytes(size):>12}  beside tensors"
    for row in fullest["live"][:_MOST_LIVE]:
        yield f"    {row['count']:>4} of {row['name']:<52} {show_bytes(row['bytes']):>12}"

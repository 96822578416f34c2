"""A plan as text: the question, the best layouts, one of them in detail, and the counts of the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

from penteract.config.device_words import device_word, of_cpu
from penteract.config.rules.kernel_packages import needs_packages
from penteract.model.count import parameters
from penteract.planner.ask import EDITS, as_shown
from penteract.planner.plan import NOT_REACHED, Plan
from penteract.planner.report.as_json import MEMORY, TrainingCost, utilisation
from penteract.planner.report.explain import best_in_others
from penteract.planner.report.host_room import HostRoom, crowded
from penteract.planner.search.best import Timed
from penteract.planner.search.priced import NEEDLESS, TOO_LARGE
from penteract.readings.ideal import PART_NAMES
from penteract.readings.memory.process_memory import process_memory
from penteract.units import show_bytes, show_count, show_seconds, show_step, show_whole

_BAR = 32  # columns of the widest bar
_ALL = 9  # columns, with the precision
_REASONS = 5  # most frequent reasons of refusal that are shown
_LAYOUT = 1  # the column of the layout
_BASIS: Mapping[str, str] = {
    "product": "matmul", "attention": "attention", "moved": "memory bandwidth", "collective": "collectives",
    "send": "P2P", "update": "optimizer", "copy": "host-device copies", "launch": "kernel launch",
    "contention": "compute slowdown during collectives",
}  # fmt: skip


def headline(plan: Plan) -> str:
    """Model, cluster and step in a line."""
    ask, counted = plan.ask, parameters(plan.ask.model)
    size = f"{show_count(counted.total)} parameters"
    if counted.active != counted.total:
        size += f" ({show_count(counted.active)} active)"
    if ask.model.mtp_layers:
        without = parameters(replace(ask.model, mtp_layers=0)).total
        size += f" with MTP, {show_count(without)} without"
    step = f"{show_whole(ask.tokens)} tokens a step ({ask.global_batch_size} sequences)"
    how = [" or ".join(one.precision.name for one in ask.each)] + [ask.optimizer] * (ask.optimizer != "adamw")
    return " · ".join([ask.model.name, size, ask.cluster.name, f"sequence length {ask.sequence_length}", step, *how])


def _terms(plan: Plan) -> str:
    """What holds for all layouts: the question, the notes of the plan, and the memory that there is."""
    ask = plan.ask
    lines = [headline(plan), *(f"Note: {note}" for note in (*plan.notes, crowded(plan)) if note)]
    if ask.usable:
        who, context = ("The CPU's host", "its system") if of_cpu(ask.cluster) else ("A GPU", "CUDA")
        lines.append(f"{who} offers {ask.cluster.memory_gib:.2f} GiB; tensors may take {show_bytes(ask.usable)} "
                    f"({ask.headroom:.0%} is left to {context}, communicators and libraries)")  # fmt: skip
    if ask.imbalance != 1:
        lines.append(
            f"Where ep > 1, the experts of the fullest {ask.devices()} get {ask.imbalance:g} times the mean of tokens"
        )
    return "\n".join(lines)


def counted(plan: Plan, seconds: float) -> str:
    """How many layouts were searched, and with which result."""
    counts = plan.counts
    what = "layout" if counts.enumerated == 1 else "layouts"
    lines = [f"{show_whole(counts.enumerated)} {what} in {_searched(seconds)}: {show_whole(counts.priced)} priced, "
            f"{show_whole(counts.fit)} fit, {show_whole(counts.simulated)} simulated"]  # fmt: skip
    shown = _REASONS + (len(counts.refused) == _REASONS + 1)  # a line for one that is left out is a line, too
    refused = [f"  {show_whole(n):>9}  {why}" for why, n in list(counts.refused.items())[:shown]]
    if rest := list(counts.refused.values())[shown:]:
        refused.append(f"  {show_whole(sum(rest)):>9}  for {len(rest)} other reasons")
    if refused:
        lines += ["Left out:", *refused]
    if counts.refused.get(NEEDLESS) or counts.fit > counts.priced - counts.refused.get(TOO_LARGE, 0):
        lines.append(
            "Not listed, though some may be fast: layouts that recompute or shard more than they must to fit; "
            "--layout shows one."
        )
    if counts.between.looked_at:
        b = counts.between
        looked, tried, fit = map(show_whole, (b.looked_at, b.tried, b.fit))
        one = b.looked_at == 1
        lines.append(f"Selective recomputation: for {looked} {'layout that fits' if one else 'layouts that fit'} with "
                    f"full recomputation, {tried} selective variants were tried; {fit} fit.")  # fmt: skip
    return "\n".join(lines)


def table(plan: Plan, width: int | None = None) -> str:
    """The best layouts, one per row. In a table wider than `width`, a layout has a line of its own below its row."""
    head = ("#", "layout", "precision", "memory", f"tok/s/{plan.ask.devices()}", "step", "MFU", "bubble", "limited by")
    rows = [head, *(_row(plan, n, timed) for n, timed in enumerate(plan.layouts, start=1))]
    if not plan.ask.also:
        rows = [(*row[:2], *row[3:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(_padded(row, widths)).rstrip() for row in rows]
    if width and max(map(len, lines)) > width:
        without = [[cell for i, cell in enumerate(_padded(row, widths)) if i != _LAYOUT] for row in rows]
        below = [" " * (widths[0] + 2) + row[_LAYOUT] for row in rows]
        lines = [line for row, own in zip(without, below, strict=True) for line in ("  ".join(row).rstrip(), own)]
    return "\n".join(lines)


def not_tried(plan: Plan) -> str:
    """What the search did not try: the line below the table."""
    return f"Not tried, and some may be faster: {'; '.join(plan.not_tried)}. Set them with --fix."


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Align words to the left, numbers to the right."""
    words = (1, len(row) - 1) if len(row) < _ALL else (1, 2, len(row) - 1)
    return [cell.ljust(w) if i in words else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]


def _row(plan: Plan, number: int, timed: Timed) -> tuple[str, ...]:
    used = utilisation(plan, timed).mfu
    bubble = timed.time.parts.get("pipeline", 0.0) / timed.time.seconds
    return (
        str(number),
        plan.ask.text(timed.layout, timed.estimate.precision),
        timed.estimate.precision.name,
        show_bytes(timed.estimate.allocated),
        show_whole(plan.rate(timed)),
        show_step(timed.time.seconds),
        "-" if used is None else f"{used:.1%}",
        f"{bubble:.1%}" if timed.layout.pp > 1 else "-",
        timed.time.limited_by,
    )


def details(plan: Plan, timed: Timed) -> str:
    """Memory and time of one layout, by kind."""
    kinds = {kind: timed.estimate.memory.get(kind, 0) for kind in MEMORY}
    ranks = ""
    if len(set(timed.estimate.by_pp_rank)) > 1:
        each = ", ".join(map(show_bytes, timed.estimate.by_pp_rank))
        ranks = f"\n  by pipeline rank: {each}"
    precision = f" in {timed.estimate.precision.name}" if plan.ask.also else ""
    used, name = utilisation(plan, timed), plan.ask.text(timed.layout, timed.estimate.precision)
    parts = sorted(timed.time.parts.items(), key=lambda item: -item[1])
    peak = "of the peak in bf16 " if timed.estimate.precision.fp8 else ""
    rates = "" if used.mfu is None else (
        f"\n  MFU {used.mfu:.1%} {peak}(full attention), {used.mfu_causal:.1%} (causal half), HFU {used.hfu:.1%}"
    )  # fmt: skip
    return "\n".join(
        [
            f"Memory of {name}{precision}: {show_bytes(timed.estimate.allocated)}",
            _bars(kinds, show_bytes) + ranks,
            *_edited(timed),
            HostRoom.of(plan, timed).text(),
            *_of_process(plan, timed),
            f"Step: {show_step(timed.time.seconds)}; limited by {timed.time.limited_by}",
            _bars({PART_NAMES[part]: seconds for part, seconds in parts}, show_step) + rates,
        ]
    )


def _edited(timed: Timed) -> list[str]:
    """What is recomputed and offloaded, if it is not the default."""
    lay, host = timed.layout, timed.estimate.host
    words = {name: value for name, value in as_shown(lay).items() if name in EDITS and value != "none"}
    lines = ["Recomputed: " + ", ".join(f"{name} {value}" for name, value in words.items())] if words else []
    there = [*lay.offload, *["the optimizer"] * lay.offload_optimizer]
    return lines + ([f"On the host: {show_bytes(host)} of {', '.join(there)}"] if host else [])


def _of_process(plan: Plan, timed: Timed) -> list[str]:
    """What a GPU has in use with all that is beside tensors, where that was measured."""
    found = process_memory(plan.search.estimators[timed.estimate.precision], timed.estimate)
    return [] if found is None else [
        f"In use on the GPU: {show_bytes(found.device)}, with libraries, the CUDA context and communicators, "
        f"for which {plan.ask.headroom:.0%} of its memory are left"
    ]  # fmt: skip


def nothing_fits(plan: Plan) -> str:
    """That nothing fits, which layouts miss by least, and how many GPUs would be enough."""
    ask = plan.ask
    if (offloads := plan.search.frontier.found.offloads) is not None and (refusal := plan.off_hosts(offloads)):
        return f"Nothing fits: {ask.text(offloads.layout)} offloads {refusal.found}; a host has {refusal.allowed}."
    if not plan.missed:
        return "No layout is possible: every one breaks a rule (above)."
    lines = ["Nothing fits. The nearest:"]
    lines += [f"  {ask.text(q.layout)} needs {show_bytes(q.allocated)}, {show_bytes(q.allocated - ask.usable)} too many"
              for q in plan.misses()]  # fmt: skip
    if plan.larger:
        cluster, estimate = plan.larger
        lines.append(f"On {cluster.name} it fits: {ask.text(estimate.layout)} needs {show_bytes(estimate.allocated)}.")
    elif of_cpu(ask.cluster):
        lines.append("More processes share the same memory; a shorter sequence or a smaller model would fit.")
    elif plan.counts.enumerated > 1:
        lines.append("Nor does it on many more of these GPUs; a shorter sequence or a smaller model would.")
    return "\n".join(lines)


def spent(b: TrainingCost, ranks: int, *, on_cpus: bool = False) -> str:
    """GPU-hours, on CPUs process-hours, days and cost in a line."""
    cost = "" if b.usd is None else f", {show_whole(b.usd)} USD"
    days = f"{show_whole(b.days, 1)} days" if b.days < 1000 else f"{b.days / 365.25:.1f} years"
    if b.days < 1:
        days = show_seconds(b.days * 86400)
    hours, there = f"{device_word(on_cpus=on_cpus)}-hours", f"{ranks} {device_word(ranks, on_cpus=on_cpus)}"
    return f"{show_count(b.tokens)} tokens: {show_whole(b.gpu_hours)} {hours}, {days} on {there}{cost}"


def basis(plan: Plan) -> str:
    """Where the rates come from, in each precision: their usual source once, then what each adds to it or has instead
    of it."""
    lines: list[str] = []
    width = max(map(len, _BASIS.values())) + 2
    for precision, estimator in plan.search.estimators.items():
        split = {what: text.partition("; ")[::2] for what, text in estimator.basis.items()}
        usual = Counter(source for source, _ in split.values()).most_common(1)[0][0]
        lines.append(f"Rates{f' in {precision.name}' if plan.ask.also else ''}, {usual}")
        for what, (source, detail) in split.items():
            own = "; ".join(part for part in (source if source != usual else "", detail) if part)
            lines.append(f"  {_BASIS.get(what, what):<{width}}{own}".rstrip())
    return "\n".join(lines)


def wrapped(text: str, width: int | None) -> str:
    """`text` with lines of at most `width` columns. Words, so layouts too, stay whole."""
    if width is None:
        return text
    lines = list[str]()
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        short = len(line) <= width
        lines += [line] if short else wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )  # fmt: skip
    return "\n".join(lines)


def as_text_whole(
    plan: Plan, chosen: Timed | None, seconds: float, explanation: Sequence[str], width: int | None = None
) -> str:
    """The whole answer: the question, the best, `chosen` in detail, the `explanation` of it, and what the search did.
    That comes first if nothing fits, as it says why."""
    parts, search = [_terms(plan)], counted(plan, seconds)
    if not plan.counts.fit:
        parts += [search, nothing_fits(plan)]
    elif plan.counts.enumerated > 1:
        parts.append("\n".join([table(plan, width), *best_in_others(plan), not_tried(plan)]))
    if chosen:
        parts.append(details(plan, chosen))
    if explanation and plan.counts.enumerated > 1:
        parts.append("\n".join(explanation))
    if plan.counts.fit:
        parts.append(search)
    rates = f"Rates {plan.estimator.basis.get('collective', 'unknown')}"
    modelled = "Times are modelled, to rank layouts; how far recorded steps are: docs/benchmarks.md"
    parts.append("\n".join([*(line + _instead(plan) for line in packages_needed_by(plan)), rates, modelled]))
    return wrapped("\n\n".join(part for part in parts if part), width)


def packages_needed_by(plan: Plan) -> tuple[str, ...]:
    """What the layouts need in addition to torch: a line, or none."""
    return needs_packages(plan.packages)


def _instead(plan: Plan) -> str:
    """Where a host is told to lack these packages, and how to plan for it."""
    without = "; --packages none plans without" if set(plan.packages) <= plan.ask.packages else ""
    return f" there (penteract doctor names what they lack){without}"


def stopped(plan: Plan, seconds: float, width: int | None = None) -> str:
    """The result of a search that was stopped, marked as incomplete."""
    left = show_whole(plan.counts.refused.get(NOT_REACHED, 0))
    mark = f"INCOMPLETE: the search was stopped. {left} layouts were not looked at; better ones may be among them."
    best = f"The best so far:\n{table(plan, width)}\n{not_tried(plan)}" if plan.layouts else "No layout was timed yet."
    return wrapped("\n\n".join([mark, _terms(plan), best, counted(plan, seconds), mark]), width)


def _bars(values: Mapping[str, float], show: Callable[[Any], str]) -> str:
    """A bar for each value of more than a thousandth of the largest."""
    most = max(values.values(), default=0)
    shown = {name: (value, show(value)) for name, value in values.items() if value > most / 1000}
    names, numbers = max(map(len, shown), default=0), max((len(text) for _, text in shown.values()), default=0)
    return "\n".join(
        f"  {name:<{names}}  {text:>{numbers}} {'▇' * max(1, round(_BAR * value / most))}"
        for name, (value, text) in shown.items()
    )


def _searched(seconds: float) -> str:
    return show_step(seconds) if seconds < 60 else show_seconds(seconds)

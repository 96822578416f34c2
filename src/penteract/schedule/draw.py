"""A schedule as a text picture: one row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.schedule.actions import ComputeList, computes
from penteract.schedule.check import Report, check
from penteract.schedule.schedule import Placement
from penteract.schedule.transfers import with_transfers


def draw(lists: Sequence[ComputeList], placement: Placement, micros: int, *, width: int = 120) -> str:
    """The schedule in unit time, at most `width` columns wide, with its bubble and its peaks below.

    A cell is F, B, I or W and the micro-batch, then the chunk after a point if it is not 0; dashes continue an action,
    dots are the bubble. The picture shows the checked action lists, so what it shows can run.

    Raises Bug("SCHEDULE") as `check` does.
    """
    report, pp = check(with_transfers(lists, placement), placement, micros), placement.pp
    labels = {str(part) for actions in lists for action in actions for part in computes(action)}
    head = len(f"rank {pp - 1}  ")
    steps, widest = int(report.makespan), max(map(len, labels))
    # No spaces between cells only if the whole picture fits in that way.
    cell = widest if head + steps * widest <= width < head + steps * (widest + 1) - 1 else widest + 1
    shown = min(steps, max(1, (width - head + 1) // cell))
    rows = [
        (f"rank {rank}".ljust(head) + "".join(_cells(report, rank, cell, widest)[:shown])).rstrip()
        for rank in range(pp)
    ]
    if shown < steps:
        rows.append(f"(cut after {shown} of {steps} units of time; all of it takes {head + steps * widest} columns)")
    return "\n".join([*rows, _summary(report)])


def _cells(report: Report, rank: int, cell: int, widest: int) -> list[str]:
    """One string of `cell` columns for each unit of time."""
    row = [("." * widest).ljust(cell)] * int(report.makespan)
    for span in report.spans[rank]:
        at = int(span.start)
        for part in computes(span.action):
            row[at] = str(part).ljust(cell)
            at += 1
            if part.kind == "Bwd":
                row[at] = ("-" * widest).ljust(cell)
                at += 1
    return row


def _summary(report: Report) -> str:
    peaks = " ".join(map(str, report.in_flight_peak))
    return f"bubble {report.bubble:.1%} of {report.makespan:.0f} units; activations in flight by rank, at most: {peaks}"

"""A schedule as a text picture: one row per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.schedule.actions import ComputeList, computes
from penteract.schedule.check import Report, check
from penteract.schedule.registry import generate
from penteract.schedule.schedule import Placement
from penteract.schedule.transfers import with_transfers

_GAP = "… "  # in place of units that are left out


def draw(
    compute_lists: Sequence[ComputeList], placement: Placement, num_micro_batches: int, *, width: int = 120
) -> str:
    """The schedule in unit time, at most `width` columns wide, with its bubble and its peaks below. F, I and W take one
    unit, B takes two; messages take none. If not all units fit, the first and the last are shown.

    A cell is F, B, I or W and the micro-batch, then the chunk after a point if it is not 0; dashes are the second unit
    of a B, dots are the bubble. The picture shows the checked action lists, so what it shows can run.

    Raises Bug("SCHEDULE") as `check` does.
    """
    report, pp = check(with_transfers(compute_lists, placement), placement, num_micro_batches), placement.pp
    parts = {part for actions in compute_lists for action in actions for part in computes(action)}
    name_width, label_width = len(f"rank {pp - 1}  "), max(len(str(part)) for part in parts)
    units, whole = int(report.makespan), name_width + int(report.makespan) * label_width
    # No spaces between cells only if the whole picture fits in that way.
    cell_width = label_width if whole <= width < whole + units - 1 else label_width + 1
    shown = units if name_width + units * cell_width - 1 <= width else _fitting(width - name_width, cell_width)
    first, last = shown - shown // 2, shown // 2
    rows = list[str]()
    for rank in range(pp):
        cells = _cells(report, rank, cell_width, label_width)
        drawn = cells if shown == units else [*cells[:first], _GAP, *cells[units - last :]]
        rows.append((f"rank {rank}".ljust(name_width) + "".join(drawn)).rstrip())
    if shown < units:
        rows.append(f"(without time units {first + 1} to {units - last} of {units}; all of it takes {whole} columns)")
    return "\n".join([*rows, _summary(report, {part.kind for part in parts}, placement)])


def draw_generated(schedule: str, vpp: int, placement: Placement, num_micro_batches: int, *, width: int = 120) -> str:
    """The same for a schedule by name."""
    lists = generate(schedule, placement.pp, vpp, num_micro_batches)
    return draw(lists, placement, num_micro_batches, width=width)


def _fitting(width: int, cell_width: int) -> int:
    """How many units fit beside the gap."""
    return max(1, (width + 1 - len(_GAP)) // cell_width)


def _cells(report: Report, rank: int, cell_width: int, label_width: int) -> list[str]:
    """One string of `cell_width` columns for each unit of time."""
    row = [("." * label_width).ljust(cell_width)] * int(report.makespan)
    for span in report.spans[rank]:
        at = int(span.start)
        for part in computes(span.action):
            row[at] = str(part).ljust(cell_width)
            at += 1
            if part.kind == "Bwd":  # a full backward takes two units
                row[at] = ("-" * label_width).ljust(cell_width)
                at += 1
    return row


def _summary(report: Report, kinds: set[str], placement: Placement) -> str:
    of_one = ", ".join(kind[0] for kind in ("Fwd", "Inp", "Wgt") if kind in kinds)
    lengths = f"{of_one}: 1" + "; B: 2, with --" * ("Bwd" in kinds)
    alive = "micro-batches" if placement.vpp == 1 else "chunk passes"
    peaks = " ".join(map(str, report.in_flight_peak))
    time = f"{report.makespan:.0f} time units ({lengths})"
    return f"bubble {report.bubble:.1%} of {time}; peak {alive} in flight by rank: {peaks}"

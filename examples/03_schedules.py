"""Who does what when: the four pipeline schedules drawn, with their bubbles and what they keep in flight. No torch.

A schedule is a list of actions for every rank and nothing else. Because it is data, it can be drawn, proven free of
deadlock without any buffer, and executed, and all three see the same list.

    python examples/03_schedules.py
"""

from __future__ import annotations

import sys

from penteract.schedule.check import Report, check
from penteract.schedule.draw import draw
from penteract.schedule.registry import SCHEDULES, ScheduleName, generate, schedule_of
from penteract.schedule.transfers import with_transfers

PP, MICROS = 4, 8  # ranks, micro-batches


def chunks(name: ScheduleName) -> int:
    """The fewest that it takes."""
    return schedule_of(name).min_vpp


def judged(name: ScheduleName) -> Report:
    """Add the messages between stages, then check: whole, in order, free of deadlock. A walk of a chunk takes 1."""
    vpp = chunks(name)
    placement = schedule_of(name).placement(PP, vpp)
    return check(with_transfers(generate(name, PP, vpp, MICROS), placement), placement, MICROS)


def main() -> None:
    print(f"{PP} ranks, {MICROS} micro-batches. F forward, B backward, I and W its two halves; dots are the bubble.\n")
    for name in SCHEDULES:
        vpp = chunks(name)
        print(f"{name}:")
        print(draw(generate(name, PP, vpp, MICROS), schedule_of(name).placement(PP, vpp), MICROS, width=150), "\n")

    reports = {name: judged(name) for name in SCHEDULES}
    print(f"{'':14}bubble   layers' activations kept by rank, in micro-batches of a whole stage")
    for name, r in reports.items():
        kept = "  ".join(f"{peak / chunks(name):4.1f}" for peak in r.in_flight_peak)
        print(f"{name:14}{r.bubble:5.1%}   {kept}")

    gpipe, one, inter, zero = (reports[name] for name in ("gpipe", "1f1b", "interleaved", "zb_h1"))
    assert one.bubble == gpipe.bubble, "1F1B is about memory alone"
    assert gpipe.in_flight_peak == (MICROS,) * PP and one.in_flight_peak == (4, 3, 2, 1)
    assert inter.bubble < one.bubble and zero.bubble < one.bubble
    assert inter.in_flight_peak[0] / 2 > one.in_flight_peak[0], "chunks buy a smaller bubble with more activations"
    assert max(zero.in_flight_peak) == PP, "split backward keeps late ranks as full as the first, and no fuller"
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()

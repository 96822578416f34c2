"""From a schedule's name to its lists."""

from __future__ import annotations

from penteract.errors import BadInput
from penteract.schedule.actions import ComputeList
from penteract.schedule.all_forward import all_forward
from penteract.schedule.interleaved import interleaved
from penteract.schedule.one_f_one_b import one_f_one_b
from penteract.schedule.woven import woven
from penteract.schedule.zero_bubble import zero_bubble_h1
from penteract.spec.schedules import ScheduleName, schedule_breach


def generate(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> list[ComputeList]:
    """What each pipeline rank computes, in order; index = pipeline coordinate.

    Raises BadInput("SCHEDULE") for sizes that `schedule_breach` names.
    """
    if wrong := schedule_breach(schedule, pp, vpp, micros):
        raise BadInput("SCHEDULE", wrong[1], where=wrong[0])
    match schedule:
        case "afab":
            return all_forward(pp, vpp, micros)
        case "1f1b":
            return one_f_one_b(pp, micros)
        case "interleaved":
            return interleaved(pp, vpp, micros)
        case "zb_h1":
            return zero_bubble_h1(pp, micros)
        case "woven":
            return woven(micros)

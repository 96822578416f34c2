"""The schedules there are, by name. A new one is a file with its value, and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penteract.errors import BadInput
from penteract.schedule.actions import ComputeList
from penteract.schedule.all_forward import ALL_FORWARD
from penteract.schedule.interleaved import INTERLEAVED
from penteract.schedule.one_f_one_b import ONE_F_ONE_B
from penteract.schedule.schedule import Schedule
from penteract.schedule.woven import WOVEN
from penteract.schedule.zero_bubble import ZB_H1

_ALL = (ALL_FORWARD, ONE_F_ONE_B, INTERLEAVED, ZB_H1, WOVEN)
SCHEDULES = {s.name: s for s in _ALL if not s.woven}  # that a layout may name
_WOVEN = {s.name: s for s in _ALL if s.woven}

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[*SCHEDULES]  # a run file's key shows and checks these


def schedule_of(name: ScheduleName) -> Schedule:
    """The schedule of this name. Raises KeyError where there is none."""
    return SCHEDULES.get(name) or _WOVEN[name]


def breach(name: ScheduleName, pp: int, vpp: int, micros: int) -> tuple[str, str] | None:
    """(the axis to blame, what is wrong), or None when the schedule exists for `micros` micro-batches."""
    for axis, size in (("pp", pp), ("vpp", vpp), ("gradient_accumulation_steps", micros)):
        if size < 1:
            return axis, f"{axis} is less than 1"
    s = schedule_of(name)
    if pp < s.least_pp:
        return "schedule", f"{name} needs pp of at least {s.least_pp}"
    if pp > s.most_pp:
        return "pp", f"{name} takes pp of at most {s.most_pp}"
    if vpp < s.least_vpp:
        return "vpp", f"{name} needs vpp of at least {s.least_vpp}"
    if vpp > 1 and pp == 1:
        return "vpp", "without a pipeline (pp = 1) a rank holds one chunk"
    if vpp > s.most_vpp:
        most = "one chunk" if s.most_vpp == 1 else f"at most {s.most_vpp} chunks"
        more = " and ".join(other.name for other in SCHEDULES.values() if other.most_vpp >= vpp)
        return "vpp", f"{name} runs {most} a rank; {more} take more"
    if micros % s.round(pp):
        rounds = f"{name} takes micro-batches in rounds of pp = {pp}"
        return "gradient_accumulation_steps", f"{rounds}, and gradient_accumulation_steps = {micros}"
    return None


def generate(name: ScheduleName, pp: int, vpp: int, micros: int) -> list[ComputeList]:
    """What each pipeline rank computes, in order; index = pipeline coordinate.

    Raises BadInput("SCHEDULE") for sizes that `breach` names.
    """
    if wrong := breach(name, pp, vpp, micros):
        raise BadInput("SCHEDULE", wrong[1], where=wrong[0])
    return schedule_of(name).compute(pp, vpp, micros)

"""All schedules, by name. A new one is a file with its `Schedule`, and an entry here."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from penteract.errors import BadInput
from penteract.schedule.actions import ComputeList
from penteract.schedule.generators.gpipe import ALL_FORWARD
from penteract.schedule.generators.interleaved import INTERLEAVED
from penteract.schedule.generators.one_f_one_b import ONE_F_ONE_B
from penteract.schedule.generators.overlapped import OVERLAPPED
from penteract.schedule.generators.zero_bubble import ZB_H1
from penteract.schedule.schedule import Schedule

_ALL = (ALL_FORWARD, ONE_F_ONE_B, INTERLEAVED, ZB_H1, OVERLAPPED)
SCHEDULES = {s.name: s for s in _ALL if not s.overlapped}  # those that a layout may use
_OVERLAPPED = {s.name: s for s in _ALL if s.overlapped}

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[*SCHEDULES]  # run files show and check these values


def schedule_of(name: ScheduleName) -> Schedule:
    """The schedule of this name. Raises KeyError if there is none."""
    return SCHEDULES.get(name) or _OVERLAPPED[name]


def breach(name: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> tuple[str, str] | None:
    """(the setting at fault, what is wrong), or None if the schedule exists for these sizes and micro-batches."""
    for setting, size in (("pp", pp), ("vpp", vpp), ("gradient_accumulation_steps", num_micro_batches)):
        if size < 1:
            return setting, f"{setting} is less than 1"
    s = schedule_of(name)
    if pp < s.min_pp:
        return "schedule", f"{name} needs pp of at least {s.min_pp}"
    if pp > s.max_pp:
        return "pp", f"{name} takes pp of at most {s.max_pp}"
    if vpp < s.min_vpp:
        return "vpp", f"{name} needs vpp of at least {s.min_vpp}"
    if vpp > 1 and pp == 1:
        return "vpp", "without a pipeline (pp = 1) a rank holds one chunk"
    if vpp > s.max_vpp:
        most = "one chunk" if s.max_vpp == 1 else f"at most {s.max_vpp} chunks"
        more = [other.name for other in SCHEDULES.values() if other.max_vpp >= vpp]
        return "schedule" if more else "vpp", f"{name} runs {most} a rank; {' and '.join(more)} take more"
    if num_micro_batches % s.round(pp):
        multiple = f"{name} needs a multiple of pp = {pp} micro-batches"
        return "gradient_accumulation_steps", f"{multiple}, and gradient_accumulation_steps = {num_micro_batches}"
    return None


def _mended(name: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> str:
    """The nearest sizes for which the schedule exists; only those that must change."""
    s = schedule_of(name)
    ranks = int(min(max(pp, s.min_pp), s.max_pp))
    chunks = int(min(max(vpp, s.min_vpp), s.max_vpp)) if ranks > 1 else 1
    whole = max(1, -(-num_micro_batches // s.round(ranks))) * s.round(ranks)
    sizes = (("pp", pp, ranks), ("vpp", vpp, chunks), ("gradient_accumulation_steps", num_micro_batches, whole))
    return ", ".join(f"{setting} = {near}" for setting, size, near in sizes if near != size)


def generate(name: ScheduleName, pp: int, vpp: int, num_micro_batches: int) -> list[ComputeList]:
    """What each pipeline rank computes, in order; index = pipeline coordinate.

    Raises BadInput("SCHEDULE") for an unknown name, and for sizes that `breach` reports.
    """
    if name not in SCHEDULES and name not in _OVERLAPPED:
        near = get_close_matches(name, SCHEDULES, 1) or [*SCHEDULES]
        raise BadInput("SCHEDULE", "no such schedule", where="schedule", found=name, allowed=", ".join(SCHEDULES),
                       fix=near[0])  # fmt: skip
    if wrong := breach(name, pp, vpp, num_micro_batches):
        setting, what = wrong
        sizes = {"pp": pp, "vpp": vpp, "gradient_accumulation_steps": num_micro_batches}
        raise BadInput("SCHEDULE", what, where=setting, found=", ".join(f"{k} = {n}" for k, n in sizes.items()),
                       fix=_mended(name, pp, vpp, num_micro_batches))  # fmt: skip
    return schedule_of(name).compute(pp, vpp, num_micro_batches)

"""From a schedule's name to its lists, and what each schedule cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penteract.errors import BadInput
from penteract.schedule.actions import ComputeList
from penteract.schedule.all_forward import all_forward
from penteract.schedule.interleaved import interleaved
from penteract.schedule.one_f_one_b import one_f_one_b
from penteract.schedule.woven import woven
from penteract.schedule.zero_bubble import zero_bubble_h1
from penteract.spec.layout import Schedule

ScheduleName = Schedule | Literal["woven"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a combination cannot be, in the words of an error line."""

    what: str
    found: str
    allowed: str
    fix: str


def generate(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> list[ComputeList]:
    """What each pipeline rank computes, in order; index = pipeline coordinate.

    Raises BadInput("SCHEDULE") for a combination that `problem` names.
    """
    if wrong := problem(schedule, pp, vpp, micros):
        raise BadInput("SCHEDULE", wrong.what, found=wrong.found, allowed=wrong.allowed, fix=wrong.fix)
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


def problem(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> Problem | None:
    """None when the schedule exists for these sizes, else the first reason why not."""
    for name, size in (("pp", pp), ("vpp", vpp), ("gradient_accumulation_steps", micros)):
        if size < 1:
            return Problem(f"{name} counts from one", f"{name}={size}", ">= 1", f"{name} = 1")
    if schedule == "interleaved":
        return _interleaved_problem(pp, vpp, micros)
    if schedule == "woven" and pp > 1:
        return Problem("the woven schedule has a single stage", f"pp={pp}", "pp=1", "pp = 1, or schedule = 1f1b")
    if vpp > 1 and pp == 1:
        return Problem("chunks need pipeline ranks to alternate between", f"vpp={vpp} with pp=1", "vpp=1", "vpp = 1")
    if vpp > 1 and schedule != "afab":
        fix = "vpp = 1, or schedule = interleaved"
        return Problem(f"{schedule} has one chunk a rank", f"vpp={vpp}", "vpp=1", fix)
    return None


def _interleaved_problem(pp: int, vpp: int, micros: int) -> Problem | None:
    if pp < 2:
        return Problem("interleaved needs pipeline ranks", f"pp={pp}", "pp >= 2", "pp = 2, or schedule = 1f1b")
    if vpp < 2:
        fix = "vpp = 2, or schedule = 1f1b"
        return Problem("interleaved needs several chunks a rank", f"vpp={vpp}", "vpp >= 2", fix)
    if micros % pp:
        below, above = micros - micros % pp, micros - micros % pp + pp
        near = f"{below} or {above}" if below else str(above)
        return Problem(
            "interleaved sends micro-batches in groups of pp",
            f"gradient_accumulation_steps={micros} with pp={pp}",
            f"multiples of {pp}",
            f"gradient_accumulation_steps = {near}",
        )
    return None

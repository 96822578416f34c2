"""Which sizes a pipeline schedule exists for: the one statement of it, for error lines and generators alike."""

from __future__ import annotations

from typing import Literal

from penteract.spec.layout import Schedule

ScheduleName = Schedule | Literal["woven"]  # woven: one stage, two passes walked in turns; a proof, not a layout


def schedule_breach(schedule: ScheduleName, pp: int, vpp: int, micros: int) -> tuple[str, str] | None:
    """(the axis to blame, what is wrong), or None when the schedule exists for `micros` micro-batches."""
    for axis, size in (("pp", pp), ("vpp", vpp), ("gradient_accumulation_steps", micros)):
        if size < 1:
            return axis, f"{axis} is less than 1"
    if schedule == "interleaved":
        if pp < 2:
            return "schedule", "interleaved needs pp of at least 2"
        if vpp < 2:
            return "vpp", "interleaved needs vpp of at least 2"
        if micros % pp:
            rounds = f"interleaved takes micro-batches in rounds of pp = {pp}"
            return "gradient_accumulation_steps", f"{rounds}, and gradient_accumulation_steps = {micros}"
    elif schedule == "woven" and pp > 1:
        return "pp", "woven has a single stage"
    elif vpp > 1 and pp == 1:
        return "vpp", "without a pipeline (pp = 1) a rank holds one chunk"
    elif vpp > 1 and schedule != "afab":
        return "vpp", f"{schedule} runs one chunk a rank; interleaved and afab take more"
    return None

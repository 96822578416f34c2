"""Times, texts and shares of a profile as the page shows them."""

from __future__ import annotations

from penteract.explore.amounts import share
from penteract.explore.schemas.profile_schema import ProfiledTime
from penteract.units import printable, show_step

PS = 10**12
_LONGEST = 400  # letters of a text


def time_text(picoseconds: int, sign: str = "") -> str:
    """A time for people; what is shorter than a tenth of a millisecond in microseconds. `sign`: "+": a difference."""
    if not picoseconds:
        return "0"
    if abs(picoseconds) < 10**8:
        return f"{picoseconds / 10**6:{sign}.3g} µs".replace("-", "−")
    return show_step(picoseconds / PS, sign).replace("-", "−")


def timed(picoseconds: int) -> ProfiledTime:
    """A time with its text."""
    return {"picoseconds": picoseconds, "text": time_text(picoseconds)}


def part_of(part: float, whole: float = 1.0) -> str:
    """A share of a whole: "12.3 %", "−4.0 %"."""
    return share(part, whole).replace("-", "−")


def safe(text: object) -> str:
    """A text of a file that may be by strangers."""
    return printable(str(text), _LONGEST)

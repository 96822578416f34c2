"""Numbers as the page shows them: each with its text, and axes with their marks."""

from __future__ import annotations

from math import floor, log10

from penteract.explore.schemas.page_schema import Amount, ChartAxis, DeviceMemory, Tick
from penteract.planner.ask import Ask
from penteract.units import GIB, KIB, MIB, Bytes, Seconds, show_bytes, show_step

_MARKS = 8  # at most, of an axis
_BEYOND = 6.0  # a card this many times as large as what is drawn is left out of the figure
_ROOM = 1.04  # of an axis beyond what it shows


def amount(size: Bytes) -> Amount:
    """Bytes with their text."""
    return {"bytes": size, "text": show_bytes(size)}


def change(size: Bytes) -> str:
    """A difference in bytes: "+1.20 GiB", "−3.00 GiB"."""
    return f"{'−' if size < 0 else '+'}{show_bytes(abs(size))}"


def share(part: float, whole: float) -> str:
    """A part of a whole in per cent; "<0.1 %" for what rounds to nothing."""
    if not whole or not part:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if abs(percent) >= 0.1 else "<0.1 %"


def bytes_axis(most: Bytes, card: Bytes) -> tuple[ChartAxis, bool]:
    """An axis for up to `most` bytes, with the card's line where it is near. -> the axis, and whether it is."""
    drawn = 0 < card <= _BEYOND * max(1, most)
    end = _ROOM * max(most, card if drawn else 0, 1)
    unit, name = next(((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if end >= u), (1, "B"))
    step = nice(end / unit)
    marks = [n * step for n in range(floor(end / unit / step) + 1)]
    return {"most": end, "ticks": [{"at": m * unit, "text": f"{m:g} {name}" if m else "0"} for m in marks]}, drawn


def seconds_axis(seconds: Seconds, shown: float = 1.0) -> list[Tick]:
    """Marks of a time axis, as shares of its width."""
    end = seconds * shown
    if end <= 0:
        return []
    step = nice(end)
    return [{"at": n * step / end, "text": show_step(n * step) if n else "0"} for n in range(floor(end / step) + 1)]


_ZOOMS = 7  # 1, 2, 4 … 64


def moments(end: Seconds) -> list[list[Tick]]:
    """Marks of a time axis at each zoom, as shares of its width. Their texts have the digits that tell them apart."""
    levels = list[list[Tick]]()
    for zoom in range(_ZOOMS):
        step = nice(end / 2**zoom)
        unit, name = (1.0, "s") if end >= 1 else (1e-3, "ms") if end >= 1e-3 else (1e-6, "µs")
        digits = max(0, -floor(log10(step / unit) + 1e-9))
        marks = [n * step for n in range(floor(end / step) + 1)]
        levels.append([{"at": m / end, "text": f"{m / unit:.{digits}f} {name}" if m else "0"} for m in marks])
    return levels


def difference(seconds: Seconds, was: Seconds) -> str:
    """Another step time against this one: "+12 ms (+0.4%)"."""
    return f"{show_step(seconds - was, '+')} ({seconds / was - 1:+.1%})".replace("-", "−")


def nice(end: float) -> float:
    """A step of 1, 2 or 5 times a power of ten with which an axis up to `end` has at most `_MARKS` marks."""
    power = 10.0 ** floor(log10(end / _MARKS))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if end / step <= _MARKS)


def card_of(ask: Ask, *, drawn: bool) -> DeviceMemory:
    """The device's memory, and what tensors may take of it."""
    size, name = int(ask.cluster.memory_gib * GIB), ask.cluster.gpu.name if ask.cluster.gpu else ask.cluster.name
    text = f"{name}: {show_bytes(size)}; tensors may take {show_bytes(ask.usable)} ({ask.headroom:.0%} is kept free)"
    return {"name": name, "amount": amount(size), "usable": amount(ask.usable), "text": text, "drawn": drawn}

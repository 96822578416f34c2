"""Kinds of numbers: how each is shown, which way is better, and how an axis of it is marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Literal

from penteract.explore.amounts import nice
from penteract.explore.schemas.page_values import Tick
from penteract.units import GIB, KIB, MIB, show_bytes, show_step, show_whole

Better = Literal["most", "least", ""]
_EMPTY = 0.3  # of an axis that may be empty below its least value: more, and it does not begin at 0
_ROOM = 1.05  # of an axis beyond what it shows


@dataclass(frozen=True, slots=True)
class NumberKind:
    """A kind of numbers.

    unit   of the column, as people read it; `show`: a value with its unit, where a unit is not in the label alone
    base   what 1 is in the kind's base: bytes, seconds, 1. `of`: the base; two kinds of one base can be compared
    """

    unit: str
    show: Callable[[float], str]
    better: Better = ""
    base: float = 1.0
    of: str = ""


def plain(value: float) -> str:
    """A number without a unit: as many digits as tell it."""
    if value == int(value):
        return show_whole(value) if abs(value) < 1e15 else f"{value:.3g}"
    return show_whole(value, 1) if abs(value) >= 1000 else f"{value:.4g}"


def _rate(value: float) -> str:
    return show_whole(value) if abs(value) >= 100 else f"{value:.3g}"


KINDS: Mapping[str, NumberKind] = {
    "rate": NumberKind("tokens/s", _rate, "most", of="rate"),
    "share": NumberKind("%", lambda v: f"{v:.1%}", "most", of="share"),
    "spread": NumberKind("%", lambda v: f"{v:.1%}", "least", of="share"),
    "percent": NumberKind("%", lambda v: f"{v:.1f}%", "most", 0.01, "share"),
    "bytes": NumberKind("bytes", lambda v: show_bytes(round(v)), "least", of="bytes"),
    "gib": NumberKind("GiB", lambda v: f"{v:.2f} GiB", "least", GIB, "bytes"),
    "gb": NumberKind("GB", lambda v: f"{v:.2f} GB", "least", 1e9, "bytes"),
    "mib": NumberKind("MiB", lambda v: f"{v:.1f} MiB", "least", MIB, "bytes"),
    "seconds": NumberKind("s", show_step, "least", of="seconds"),
    "milliseconds": NumberKind("ms", lambda v: show_step(v / 1000), "least", 1e-3, "seconds"),
    "cost": NumberKind("", plain, "least"),
    "number": NumberKind("", plain),
}  # fmt: skip
_NAMES: tuple[tuple[str, str], ...] = (  # the first whose letters a name has
    (r"(^|_)gpu_?(s|h|min|seconds|hours|minutes)($|_)", "cost"),
    (r"tok(en)?s?_?(per|/)_?s", "rate"), (r"pct|percent", "percent"), (r"^[mh]fu(_|$)|utili[sz]ation", "share"),
    (r"spread", "spread"), (r"bytes$", "bytes"), (r"gib($|_)", "gib"), (r"(^|_)gb($|_)", "gb"), (r"mib($|_)", "mib"),
    (r"(^|_)ms($|_)", "milliseconds"), (r"(^|_)s(ec(onds?)?)?($|_)", "seconds"),
    (r"^(gpus|ranks|nodes|world|world_size)$|loss|usd|cost", "cost"),
)  # fmt: skip


def kind_of(name: str, most: float) -> NumberKind:
    """The kind of a column, by its name. `most`: its largest value: a share of 40 is one in per cent."""
    low = name.lower()
    found = next((kind for letters, kind in _NAMES if re.search(letters, low)), "number")
    return KINDS["percent" if found == "share" and most > 1.5 else found]


def axis(kind: NumberKind, least: float, most: float) -> tuple[float, float, list[Tick]]:
    """An axis for values between two. -> its ends, and its marks as shares of it."""
    if (least >= 0 and least <= _EMPTY * most) or least == most == 0:
        start, end = 0.0, _ROOM * most or 1.0
    else:
        room = (_ROOM - 1) * (most - least or abs(most))
        start, end = least - room, most + room
    unit, name = _unit(kind, max(abs(start), abs(end)))
    step = nice((end - start) / unit)
    marks = [n * step for n in range(ceil(start / unit / step - 1e-9), floor(end / unit / step + 1e-9) + 1)]
    ticks: list[Tick] = [{"at": (m * unit - start) / (end - start), "text": _mark(m, name)} for m in marks]
    return start, end, ticks


def _mark(value: float, unit: str) -> str:
    if value == 0:
        return "0"
    text = show_whole(value) if abs(value) >= 1000 and value == int(value) else f"{value:.6g}"
    return f"{text} {unit}".rstrip().replace(" %", "%")


def _unit(kind: NumberKind, most: float) -> tuple[float, str]:
    """What the marks of an axis are in: a number of the column, and its name."""
    if kind.of == "bytes":
        if kind.unit == "GB":
            return 1.0, "GB"
        size, name = next(((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if most * kind.base >= u),
                          (1, "B"))  # fmt: skip
        return size / kind.base, name
    if kind.of == "seconds":
        return (1 / kind.base, "s") if most * kind.base >= 1 else (1e-3 / kind.base, "ms")
    if kind.of == "share":
        return 0.01 / kind.base, "%"
    return 1.0, ""

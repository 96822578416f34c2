"""Units: the one place that decides how bytes, seconds and counts are read and printed."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path

KIB, MIB, GIB = 2**10, 2**20, 2**30

Bytes = int
Flops = int
Seconds = float

LARGE_FACTOR = 3  # from which on a comparison is no percentage
_SUFFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12,
           "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


def gib(size: Bytes) -> float:
    """Bytes -> GiB (2^30)."""
    return size / GIB


def show_bytes(size: Bytes) -> str:
    """A size for people: memory is always binary (KiB, MiB, GiB)."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def show_count(n: float) -> str:
    """A decimal count for people: 850k, 1.24M, 8.03B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:.3g}"


def show_flops(n: Flops) -> str:
    """FLOPs for people: 7.87 PFLOP."""
    for unit, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(n) >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n} FLOP"


def show_step(s: Seconds, sign: str = "") -> str:
    """The time of a step or of a part of it: 12.0 s, 8.75 s, 388 ms; from an hour on as `show_seconds`. `sign`: "+" for
    differences."""
    if abs(s) >= 3600:
        return f"{'-' if s < 0 else sign}{show_seconds(abs(s))}"
    if abs(s) >= 9.995:
        return f"{s:{sign}.1f} s"
    if abs(s) >= 0.9995:
        return f"{s:{sign}.2f} s"
    ms = 1000 * s
    return f"{ms:{sign}.{0 if abs(ms) >= 99.95 else 1 if abs(ms) >= 9.995 else 2}f} ms"


def show_pace(ratio: float, whom: str = "", *, verb: bool = False) -> str:
    """How something compares that takes `ratio` times as long as `whom`: 20.0% slower, 15 times as long. `verb`: with
    what a sentence needs before it."""
    for takes, factor, word in (("takes ", ratio, "long"), ("is ", 1 / max(ratio, 1e-9), "fast")):
        if factor >= LARGE_FACTOR:
            times = f"{factor:.{0 if factor >= 9.95 else 1}f} times as {word}"
            return f"{takes * verb}{times}{f' as {whom}' * bool(whom)}"
    word = "slower" if ratio > 1 else "faster"
    return f"{'is ' * verb}{abs(ratio - 1):.1%} {word}{f' than {whom}' * bool(whom)}"


def show_whole(n: float, digits: int = 0) -> str:
    """A number rounded to `digits`, thousands apart: 1 048 576."""
    return f"{n:,.{digits}f}".replace(",", " ")


def printable(text: str, most: int = 0) -> str:
    """A text for a message: "?" for what does not print, and cut after `most` characters (0: all of it)."""
    safe = "".join(c if c.isprintable() else "?" for c in text)
    return f"{safe[: most - 3]}..." if 0 < most < len(safe) else safe


def show_path(path: Path) -> str:
    """A path for people: from the current folder where it lies in it, else as it is."""
    try:
        here = Path.cwd()
    except OSError:  # removed since the process began
        return str(path)
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def show_seconds(s: Seconds) -> str:
    """A duration for people: 0.8 s, 4 min 05 s, 2 h 10 min."""
    if s < 60:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def parse_count(text: str | int | float) -> int:
    """`1M` -> 1_000_000, `1Mi` -> 1_048_576, `4096` -> 4096.

    Raises ValueError when the text is no whole count.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not isfinite(text) or int(text) != text:
            raise ValueError(f"{text!r} is not a whole number")
        return int(text)
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2] not in _SUFFIX:
        raise ValueError(f"{text!r} is not a count such as 4096, 1M (10^6) or 1Mi (2^20)")
    value = float(found[1].replace("_", "")) * _SUFFIX[found[2]]
    if not isfinite(value) or int(value) != value:
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)

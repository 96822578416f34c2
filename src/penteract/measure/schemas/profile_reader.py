"""Reading `profile.json`: files are written by other versions, and opened from strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import cast

from penteract.config.files.regular import read_regular
from penteract.errors import BadInput
from penteract.measure.schemas.profile import FILE, VERSION, ProfileFile
from penteract.measure.schemas.typed_json import mismatches
from penteract.units import Bytes

LARGEST: Bytes = 2**26  # of a file
_DIGITS = 18


def read_profile(path: Path) -> ProfileFile:
    """The profile in a folder or file. Raises BadInput where there is none, or one of another version."""
    file = path / FILE if path.is_dir() else path
    try:
        text = read_regular(file, largest=LARGEST)
    except (OSError, ValueError):
        raise BadInput("PROFILE", "no profile", where=str(path), fix="penteract profile RUN.toml makes one") from None
    return profile_of(text, str(file))


def profile_of(text: str | bytes, where: str) -> ProfileFile:
    """The profile that a text is. Raises BadInput where it is none, or one of another version."""
    try:
        found: object = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise BadInput("PROFILE", f"not JSON: {error}", where=where) from None
    row = cast("dict[str, object]", found if isinstance(found, dict) else {})
    version = row.get("version")
    if version != VERSION:
        raise BadInput("PROFILE", "a profile of another version", where=where, found=str(version)[:20], allowed=VERSION,
                       fix="profile the run again")  # fmt: skip
    profile = cast("ProfileFile", row)
    if wrong := next(mismatches(row, ProfileFile), "") or next(_broken(profile), ""):
        raise BadInput("PROFILE", "not a profile", where=where, found=wrong, fix="profile the run again")
    return profile


def _broken(profile: ProfileFile) -> Iterator[str]:
    """What values of the right types may still be missing."""
    for name, some in (("waterfall", profile["waterfall"]), ("step.bare", profile["step"]["bare"]),
                       ("ranks", profile["ranks"]), ("memory", profile["memory"])):  # fmt: skip
        if not some:
            yield f"{name}: empty"
    if timeline := profile.get("timeline"):
        count = len(timeline["names"])
        for lane in (*timeline["predicted"], *timeline["measured"]):
            lists = ((lane["compute"], 2), *((stream["spans"], 3) for stream in lane["streams"]))
            if any(len(some) % each or any(not 0 <= n < count for n in some[::each]) for some, each in lists):
                yield "timeline: a name that it does not have"
            if any(n < 0 for some, _ in lists for n in some) or lane["picoseconds"] <= 0:
                yield "timeline: a time below 0"


def _whole(text: str) -> int:
    """A whole number of at most 18 digits: no size and no time is larger."""
    if len(text) > _DIGITS:
        raise ValueError(f"{text[:_DIGITS]}… is too large")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:_DIGITS]} is no number")
    return number

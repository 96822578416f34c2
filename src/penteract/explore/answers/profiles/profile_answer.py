"""The answer of the Profile view: which profiles there are, one of them in full, and another one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Protocol, cast

from penteract.errors import BadInput
from penteract.explore.answers.profiles.opened_files import ParsedFiles, opened_files
from penteract.explore.answers.profiles.profile_figures import profile_figures
from penteract.explore.answers.profiles.shown_times import safe
from penteract.explore.answers.profiles.two_profiles import not_compared, two_profiles
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.profile_schema import ProfileAnswer, ProfileChoice, ProfileComparison
from penteract.measure.schemas.profile import ProfileFile

FILLS, GIVES = "penteract profile latest", "penteract explore --profiles profiles"


class GivenProfiles(Protocol):
    """The profiles of folders that the server was given, and what was parsed of opened files."""

    @property
    def parsed(self) -> ParsedFiles:
        """Those that were opened in the page."""
        ...

    @property
    def name(self) -> str:
        """The folders' names, to read."""
        ...

    def written(self) -> Mapping[str, str]:
        """Name -> when it was written, to read; the newest first. Raises OSError."""
        ...

    def read(self, name: str) -> ProfileFile:
        """One of them. Raises BadInput."""
        ...


@dataclass(slots=True)
class NoFolder:
    """No folder was given."""

    name: str = ""
    parsed: ParsedFiles = field(default_factory=ParsedFiles)

    def written(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def read(self, name: str) -> ProfileFile:
        """Raises BadInput."""
        raise BadInput("PROFILE", "no such profile", where=name)


@dataclass(slots=True)
class _Shelf:
    """All profiles that can be shown: opened ones first."""

    given: GivenProfiles
    opened: Mapping[str, bytes]
    listed: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.listed = self.given.written()

    @property
    def names(self) -> list[str]:
        return [*self.opened, *(name for name in self.listed if name not in self.opened)]

    def read(self, name: str) -> ProfileFile:
        if name in self.opened:
            return self.given.parsed.read(self.opened[name], safe(name))
        return self.given.read(name)

    def choices(self, a: str, b: str) -> list[ProfileChoice]:
        sides = {b: "B", a: "A"}
        return [
            {"name": name, "opened": name in self.opened, "text": "opened here" if name in self.opened
             else self.listed[name], "side": cast("Any", sides.get(name, ""))}
            for name in self.names
        ]  # fmt: skip


def profile_answer(request: Mapping[str, Any], found: GivenProfiles | None = None) -> ProfileAnswer:
    """The answer to a request. `found`: the profiles of folders. Raises BadInput for a request of another form; what is
    wrong with a profile is said in the answer."""
    given = found or NoFolder()
    asked = request.get("profile")
    wanted = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    opened = opened_files(request.get("files"))
    try:
        shelf = _Shelf(given, opened)
    except OSError as error:
        return _empty(given, f"The folder cannot be read: {error.strerror}.", [])
    name, against, rank = (wanted.get(key) for key in ("name", "against", "rank"))
    a = str(name or next(iter(shelf.names), ""))
    b = str(against or "")
    if not a:
        return _empty(
            given, "There is no profile in this folder yet." if given.name else "No folder of profiles was given.", []
        )
    choices = shelf.choices(a, b)
    if a not in shelf.names:
        return _empty(given, f"There is no profile {safe(a)!r} here: open its file, or give its folder.", choices)
    try:
        profile = shelf.read(a)
    except BadInput as error:
        return _empty(given, f"{safe(a)} cannot be shown: {error}", choices)
    figures = profile_figures(profile, safe(a), rank if isinstance(rank, int) else None)
    comparison = _compared(shelf, profile, a, b) if b and b != a else None
    return {
        "version": VERSION, "kind": "profile", "served": bool(given.name), "folder": given.name,
        "command": _command(shelf, a, b) if comparison else FILLS, "why": "", "profiles": choices, "figures": figures,
        "comparison": comparison,
    }  # fmt: skip


def _command(shelf: _Shelf, a: str, b: str) -> str:
    """What prints the same comparison, from where the folder lies."""
    places = (name if name in shelf.opened else f"{shelf.given.name}/{name}" for name in (a, b))
    return f"penteract profile {' '.join(quote(safe(place)) for place in places)}"


def _compared(shelf: _Shelf, a: ProfileFile, name: str, other: str) -> ProfileComparison:
    names = safe(name), safe(other)
    if other not in shelf.names:
        return not_compared(names, f"There is no profile {names[1]!r} here: open its file, or give its folder.")
    try:
        return two_profiles(a, shelf.read(other), names)
    except BadInput as error:
        return not_compared(names, f"{names[1]} cannot be shown: {error}")


def _empty(given: GivenProfiles, why: str, choices: list[ProfileChoice]) -> ProfileAnswer:
    return {
        "version": VERSION, "kind": "profile", "served": bool(given.name), "folder": given.name,
        "command": FILLS, "why": why, "profiles": choices, "figures": None, "comparison": None,
    }  # fmt: skip

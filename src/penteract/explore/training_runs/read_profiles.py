"""Profiles in the folders that the explorer was given. They may be written meanwhile, or by strangers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penteract.config.files.regular import read_regular
from penteract.errors import BadInput
from penteract.explore.answers.profiles.opened_files import ParsedFiles
from penteract.explore.training_runs.read_runs import moment
from penteract.measure.schemas.profile import FILE, ProfileFile
from penteract.measure.schemas.profile_reader import LARGEST, profile_of
from penteract.units import printable

_MOST, _KEPT = 500, 4  # profiles that are listed, the newest; and that stay in memory
_DEEP = 2  # folders below one that was given: a profile may lie in its run's


@dataclass(slots=True)
class ProfileFolders:
    """The profiles of some folders: in them, or at most two folders below. Links are not followed.

    dated   whether they are listed by when they were written; else by their names, which begin with the day
    turn    held by who reads
    parsed  of files that were opened in the page
    """

    folders: tuple[Path, ...]
    dated: bool = True
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    parsed: ParsedFiles = field(default_factory=ParsedFiles)
    _places: dict[str, Path] = field(default_factory=dict[str, Path])
    _kept: dict[Path, tuple[tuple[int, int, int], ProfileFile]] = field(
        default_factory=dict[Path, tuple[tuple[int, int, int], ProfileFile]]
    )

    @property
    def name(self) -> str:
        """The folders' names, to read."""
        return " and ".join(dict.fromkeys(printable(folder.name, 100) for folder in self.folders))

    def written(self) -> Mapping[str, str]:
        """Name -> when it was written, to read; the newest first. Raises OSError."""
        found = list[tuple[float, str, Path]]()
        for folder in self.folders:
            for at in _profiles(folder, _DEEP):
                name = at.relative_to(folder).as_posix() if at != folder else folder.name
                found.append(((at / FILE).lstat().st_mtime if self.dated else 0.0, name, at))
        found.sort(key=lambda one: one[1], reverse=not self.dated)
        found.sort(key=lambda one: -one[0])
        self._places = dict[str, Path]()
        texts = dict[str, str]()
        for when, name, at in found[:_MOST]:
            unique = name if name not in self._places else f"{at.parent.name}/{name}"
            self._places[unique], texts[unique] = at, moment(when) if self.dated else "in these files"
        return texts

    def content(self, name: str) -> bytes:
        """The file of one of them, by a name that was listed. Raises BadInput."""
        self.read(name)
        return read_regular(self._places[name] / FILE, largest=LARGEST)

    def read(self, name: str) -> ProfileFile:
        """One of them, by a name that was listed. Raises BadInput."""
        if (at := self._places.get(name)) is None:
            raise BadInput("PROFILE", "no such profile", where=printable(name, 100))
        file = at / FILE
        try:
            if file.is_symlink():
                raise OSError(f"{FILE} is a link")
            found = file.lstat()
            key = found.st_ino, found.st_size, found.st_mtime_ns
            if (kept := self._kept.get(file)) and kept[0] == key:
                return kept[1]
            text = read_regular(file, largest=LARGEST)
        except OSError as error:
            raise BadInput("PROFILE", error.strerror or str(error), where=printable(name, 100)) from None
        profile = profile_of(text, printable(name, 100))
        self._kept[file] = key, profile
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return profile


def _profiles(folder: Path, deep: int) -> Iterator[Path]:
    """The folders with a profile. Raises OSError where the first cannot be read."""
    if (folder / FILE).is_file() and not (folder / FILE).is_symlink():
        yield folder
    if deep:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                try:
                    yield from _profiles(path, deep - 1)
                except OSError:
                    continue  # it has gone meanwhile, or is not ours

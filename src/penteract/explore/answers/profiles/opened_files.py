"""Files that the reader opened in the page: their content comes with the request, compressed."""

from __future__ import annotations

import contextlib
import zlib
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from penteract.errors import BadInput
from penteract.measure.schemas.profile import ProfileFile
from penteract.measure.schemas.profile_reader import profile_of

MOST_FILES = 8
_LARGEST = 2**26  # bytes of a file
_KEPT = 4  # profiles


@dataclass(slots=True)
class ParsedFiles:
    """The profiles in opened files, parsed: the last few are kept, as each question about a file brings it again."""

    _kept: dict[bytes, ProfileFile] = field(default_factory=dict[bytes, ProfileFile])

    def read(self, data: bytes, name: str) -> ProfileFile:
        """The profile in an opened file. Raises BadInput."""
        key = sha256(data).digest()
        if (found := self._kept.get(key)) is None:
            found = self._kept[key] = profile_of(content(data, name), name)
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return found


def opened_files(files: object) -> Mapping[str, bytes]:
    """Name -> compressed content, of a request's `files`. Raises BadInput for what has another form."""
    return dict(_named(files))


def _named(files: object) -> Iterator[tuple[str, bytes]]:
    rows = cast("list[Any]", files) if isinstance(files, list) else []
    for row in rows[:MOST_FILES]:
        file = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        name, data = file.get("name"), file.get("data")
        if not isinstance(name, str) or not isinstance(data, str):
            raise BadInput("FILE", "no opened file", where="files", allowed="objects with name and data")
        yield name, data.encode("ascii", "replace")


def content(data: bytes, name: str) -> bytes:
    """What is in an opened file. Raises BadInput."""
    inflate, found = zlib.decompressobj(-15), b""
    with contextlib.suppress(ValueError, zlib.error):
        found = inflate.decompress(urlsafe_b64decode(data + b"=" * (-len(data) % 4)), _LARGEST)
    if len(found) >= _LARGEST:
        raise BadInput("FILE", "too large to be opened in the page", where=name, allowed=f"{_LARGEST} bytes",
                       fix="give its folder to the explorer: penteract explore --profiles FOLDER")  # fmt: skip
    if not inflate.eof:
        raise BadInput("FILE", "it came damaged", where=name, fix="open it again")
    return found

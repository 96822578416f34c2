"""A file system whose server did what it was asked to and whose answer was lost."""

from __future__ import annotations

import os
from pathlib import Path

_link = os.link


def links_twice(source: Path, to: Path) -> None:
    """`os.link` whose request is sent once more after it was done."""
    _link(source, to)
    _link(source, to)

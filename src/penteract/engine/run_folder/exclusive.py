"""Files that one process alone creates, with their content, however many try. Imports no torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def create_exclusively(path: Path, text: str) -> None:
    """Create a file with its content in one operation. Raises FileExistsError if another process has.

    Over NFS a request whose answer is lost is sent again, and the second finds what the first has made. So where the
    file exists, this process may have created it: then it is the fresh file under a second name.
    """
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    fresh.write_text(text)
    try:
        os.link(fresh, path)
    except FileExistsError:
        if not _is_linked(fresh, path):
            raise
    finally:
        fresh.unlink()


def _is_linked(fresh: Path, path: Path) -> bool:
    """Whether a file has this second name. It is opened, because NFS then asks its server and not its cache."""
    with fresh.open("rb") as file:
        own = os.fstat(file.fileno())
    try:
        return own.st_nlink == 2 and os.path.samestat(own, path.lstat())
    except FileNotFoundError:
        return False

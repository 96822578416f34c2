"""`penteract init`: a run file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penteract.config.resolve.write_run_file import template
from penteract.errors import BadInput, DiskFailure

EXAMPLES = ("penteract init", "penteract init wide.toml")

_Where = Annotated[Path, Parameter(help="Where to write it; an existing file is never overwritten.")]


def init(path: _Where = Path("run.toml"), /) -> int:
    """Write a commented run file with every key, its default and its meaning."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(path.name))
    except FileExistsError:
        fix = "choose another name, or remove it"
        raise BadInput("FILE", "it exists already", where="init", found=path, fix=fix) from None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise BadInput("FILE", "no such folder", where="init", found=path.parent, fix="create it first") from None
    except OSError as error:
        raise DiskFailure.of(error, f"init {path}") from None
    print(f"{path} written. Next: penteract train {path}")
    return 0

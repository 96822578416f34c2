"""The hardware file that `penteract calibrate` keeps of a machine, which `--gpus here` takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penteract.errors import BadInput

HERE = "here"


_NAMED = re.compile(rf"(?:(\d+)x)?{HERE}", re.IGNORECASE)


def machine_named(text: str) -> re.Match[str] | None:
    """Whether `text` names this machine, as `here`, or `8xhere` for so many of its devices: a match with the number."""
    return _NAMED.fullmatch(text.strip())


def machine_file() -> Path:
    """Where the file of this host lies: hosts that share a home have one each. Raises BadInput for a user without a
    home, as in a container."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", os.uname().nodename) or "host"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise BadInput("FILE", "this user has no home folder, so no file of this machine", where="HOME",
                       fix="set XDG_CACHE_HOME, or name a file: --out or --gpus FILE.toml") from None  # fmt: skip
    return cache / "penteract" / "hardware" / f"{host}.toml"


def kept_machine_file() -> Path:
    """The file, which must be there. Raises BadInput."""
    path = machine_file()
    if not path.is_file():
        raise BadInput("CLUSTER", "this machine was not measured", where="--gpus", found=HERE,
                       allowed="a file, or a name as 8xH200", fix="penteract calibrate")  # fmt: skip
    return path

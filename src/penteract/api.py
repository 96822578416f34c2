"""The Python interface: values in, values out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penteract.errors import PenteractError


def train(run: str | Path | None = None, *, preset: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train as `penteract train --json` does, in processes of its own; returns its closing line.

    `settings` are dotted keys with `__` for the dot: `parallel__tp=2`, `training__steps=50`.
    Raises PenteractError with the run's own error.
    """
    words = [str(run)] if run is not None else []
    words += ["--preset", preset] if preset else []
    words += [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "penteract", "train", *words, "--json"], capture_output=True, text=True, check=False
    )
    last: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
    if done.returncode:
        told: dict[str, str] = last.get("error", {})
        error = PenteractError(
            told.get("code", "TRAIN"), told.get("what", done.stderr.strip()[-500:]), where=told.get("where", ""),
            found=told.get("found", ""), allowed=told.get("allowed", ""), fix=told.get("fix", ""),
        )  # fmt: skip
        error.exit_code = done.returncode
        raise error
    return last

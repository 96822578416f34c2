"""Run a probe in a child process, so that a driver that hangs or a library that crashes is a result too."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask(module: str, *, seconds: float) -> dict[str, Any]:
    """The JSON object that `python -m MODULE` prints as its last line, or {"error": why there is none}."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, errors="replace", timeout=seconds,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    errors = done.stderr.strip().splitlines()
    return {"error": errors[-1][:300] if errors else f"it ended with code {done.returncode}"}

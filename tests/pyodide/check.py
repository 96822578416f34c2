"""The part above the torch line says the same in a browser's Python as here, to the last digit.

    python tests/pyodide/check.py

Zips the package without `engine` and `cli`, asks `cases.py` of this Python and of Pyodide under node, and compares the
two JSON texts. Pyodide is installed into node_modules the first time. Exit status 1: an answer differs, or could not
be had; 0 with the reason printed: there is no node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "src" / "penteract"
BELOW = ("engine", "cli")  # the torch line
OLDEST_NODE = 20
SHOWN = 8  # differences of one case


def main() -> int:
    if reason := without_node():
        print(f"pyodide: skipped: {reason}")
        return 0
    if not (HERE / "node_modules" / "pyodide").is_dir():
        subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    same_sources = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    here = json.loads(subprocess.run([sys.executable, HERE / "cases.py"], env=same_sources, **_TEXT).stdout)
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "penteract.zip"
        zip_sources(sources)
        began = time.perf_counter()
        done = subprocess.run(["node", HERE / "run.mjs", sources, HERE / "cases.py"], **_TEXT)
        took = time.perf_counter() - began
    first, last = done.stdout.splitlines()
    there, ready = json.loads(last), json.loads(first)["ready"]
    print(f"pyodide: Python {there['python']} on {there['platform']} ready in {ready:.1f} s, all in {took:.1f} s")
    return compare(here, there)


def without_node() -> str:
    """Why this cannot be asked here; empty where it can."""
    if not (node := shutil.which("node")) or not shutil.which("npm"):
        return "node and npm are not installed"
    version = subprocess.run([node, "--version"], **_TEXT).stdout.strip()
    return (
        "" if int(version.lstrip("v").split(".")[0]) >= OLDEST_NODE else f"node {version} is older than {OLDEST_NODE}"
    )


def zip_sources(path: Path) -> None:
    """All of the package that is above the torch line, data files included."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(PACKAGE.rglob("*")):
            inside = file.relative_to(PACKAGE)
            if file.is_file() and inside.parts[0] not in BELOW and "__pycache__" not in inside.parts:
                archive.write(file, Path("penteract") / inside)


def compare(here: dict[str, Any], there: dict[str, Any]) -> int:
    """A line a case; 1 when an answer differs, or when it took something from below the line."""
    wrong: list[str] = []
    for name in {**here["says"], **there["says"]}:
        same = name in here["says"] and json.dumps(here["says"][name]) == json.dumps(there["says"].get(name))
        seconds = (
            f"{told['seconds'].get(name, 0):.3f} s {place}" for place, told in (("here", here), ("there", there))
        )
        print(f"  {'same' if same else 'DIFFERS':9}{name:26}{', '.join(seconds)}")
        if not same:
            wrong.append(name)
            print("\n".join(list(differences(here["says"].get(name), there["says"].get(name)))[:SHOWN]))
    for place, told in (("here", here), ("there", there)):
        if told["loaded"]:
            print(f"  loaded {place}: {', '.join(told['loaded'])}")
            wrong += told["loaded"]
    print(f"pyodide: {len(here['says'])} cases, {len(wrong)} failed")
    return int(bool(wrong))


def differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where two answers part, as `path: here, there`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from differences(ours.get(key), theirs.get(key), f"{at}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{at}[{i}]")
    elif json.dumps(ours) != json.dumps(theirs):
        yield f"    {at.lstrip('.')}: {json.dumps(ours)[:80]}, {json.dumps(theirs)[:80]}"


_TEXT: dict[str, Any] = {"text": True, "check": True, "stdout": subprocess.PIPE}  # its errors are on ours

if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:  # what it had to say is above
        sys.exit(f"pyodide: {Path(error.cmd[0]).name} ended with {error.returncode}")

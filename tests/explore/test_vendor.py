"""What the page takes from others: every file is listed with its hash, its package's hash and its licence."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

from penteract.explore.server.routes import ASSETS

EXPLORE = ASSETS.parent
VENDOR = ASSETS / "vendor"
PYODIDE = EXPLORE / "pyodide"
LISTED = json.loads((VENDOR / "vendor.json").read_text())["packages"]
LOCK = json.loads((Path(__file__).parent / "package-lock.json").read_text())["packages"]


def test_every_file_is_the_one_that_is_listed() -> None:
    listed = {name: f["sha256"] for package in LISTED.values() for name, f in package["files"].items()}
    files = [p for p in (*VENDOR.iterdir(), *PYODIDE.iterdir()) if p.name not in ("vendor.json", "LICENSE-MPL-2.0.txt")]
    here = {p.relative_to(EXPLORE).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    assert here == listed


def test_every_package_is_pinned_and_its_licence_is_with_it() -> None:
    for name, package in LISTED.items():
        locked = LOCK[f"node_modules/{name}"]
        assert (package["version"], package["integrity"]) == (locked["version"], locked["integrity"])
        assert package["license"] in ("MIT", "Apache-2.0", "OFL-1.1", "MPL-2.0")
        assert name == "pyodide" or any(file.endswith("LICENSE.txt") for file in package["files"])
    assert "Mozilla Public License" in (PYODIDE / "LICENSE-MPL-2.0.txt").read_text()


def test_modules_name_their_neighbours_by_their_place() -> None:
    """No import map is possible under the page's policy, so no module has a bare name."""
    for path in (*VENDOR.glob("*.mjs"), *(ASSETS / "js").glob("*.js")):
        for line in path.read_text().splitlines():
            if line.startswith(("import ", "export ")) and " from " in line:
                assert ' from "./' in line or ' from "../' in line, (path.name, line)


def test_the_wheel_stays_small() -> None:
    """At most 8 MB, of which Pyodide is most."""
    assert sum(p.stat().st_size for p in ASSETS.rglob("*") if p.is_file()) < 2**20
    packed = sum(
        len(zlib.compress(p.read_bytes(), 6)) for p in EXPLORE.parent.rglob("*") if p.is_file() and p.suffix != ".pyc"
    )
    assert packed < 8e6

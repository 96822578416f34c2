"""Write what the page takes from others: modules, a font and Pyodide from npm, in the versions of package-lock.json.

    python tests/explore/make_vendor.py

Each file's hash, its package's hash and its licence go into `vendor.json`; `test_vendor.py` compares.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
EXPLORE = HERE.parents[1] / "src" / "penteract" / "explore"
VENDOR = EXPLORE / "assets" / "vendor"
LOCK = "pyodide-lock.json"


class Taken(NamedTuple):
    """A file of a package, its name here, and where it lies in the explorer's folder."""

    package: str
    path: str
    name: str
    folder: str = "assets/vendor"


FILES = (
    Taken("preact", "dist/preact.mjs", "preact.mjs"),
    Taken("preact", "hooks/dist/hooks.mjs", "hooks.mjs"),
    Taken("htm", "dist/htm.mjs", "htm.mjs"),
    Taken("@fontsource-variable/inter", "files/inter-latin-wght-normal.woff2", "inter.woff2"),
    Taken("preact", "LICENSE", "preact-LICENSE.txt"),
    Taken("htm", "LICENSE", "htm-LICENSE.txt"),
    Taken("@fontsource-variable/inter", "LICENSE", "inter-LICENSE.txt"),
    *(
        Taken("pyodide", name, name, "pyodide")
        for name in ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", LOCK)
    ),
)


def content(file: Taken) -> bytes:
    """The file as it is here: a module names its neighbour by its place, and no source map; Pyodide's list of further
    packages is empty, as none is used."""
    data = (HERE / "node_modules" / file.package / file.path).read_bytes()
    if file.name == LOCK:
        return json.dumps({"info": json.loads(data)["info"], "packages": {}}).encode()
    if not file.name.endswith(".mjs"):
        return data
    text = re.sub(r"(from\s*)\"preact\"", r'\1"./preact.mjs"', data.decode())
    return re.sub(r"\n?//# sourceMappingURL=.*", "", text).encode()


def manifest() -> dict[str, Any]:
    """Versions, licences and hashes of packages; hashes of files."""
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    packages: dict[str, Any] = {}
    for file in FILES:
        row = lock[f"node_modules/{file.package}"]
        of = packages.setdefault(file.package, {k: row[k] for k in ("version", "license", "integrity")} | {"files": {}})
        of["files"][f"{file.folder}/{file.name}"] = {
            "from": file.path,
            "sha256": hashlib.sha256(content(file)).hexdigest(),
        }
    return {"about": "Written by tests/explore/make_vendor.py", "packages": packages}


def main() -> None:
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    for file in FILES:
        (EXPLORE / file.folder).mkdir(exist_ok=True)
        (EXPLORE / file.folder / file.name).write_bytes(content(file))
    mpl = (HERE / "node_modules" / "axe-core" / "LICENSE").read_bytes()  # Pyodide's package has its licence's name only
    (EXPLORE / "pyodide" / "LICENSE-MPL-2.0.txt").write_bytes(mpl)
    (VENDOR / "vendor.json").write_text(json.dumps(manifest(), indent=2) + "\n")


if __name__ == "__main__":
    main()

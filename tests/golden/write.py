"""Write the golden files anew, and print what changed in them: `python tests/golden/write.py [part of a name …]`.

Files without a question are removed. What is within the tolerance of the test keeps its digits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golden.record import HERE, difference, paths, record, settled, text


def main(*parts: str) -> None:
    known = paths()
    for path in HERE.glob("*/*.json"):
        if path not in known:
            path.unlink()
            print(f"removed {path.relative_to(HERE)}")
    for path, question in known.items():
        if parts and not any(part in path.stem for part in parts):
            continue
        now = record(question)
        if change := difference(path, now):
            print(change)
            path.parent.mkdir(exist_ok=True)
            stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            path.write_text(text(settled(stored, now)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Collectives in which ranks read each other's memory, beside those of the library: rows of `penteract calibrate`.

python benchmarks/direct_links.py here.rows.jsonl --commit HASH > benchmarks/results/direct_links_4xh200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from provenance import hexadecimal, provenance

from penteract.config.files.hardware_schema import DIRECT, DIRECTLY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--commit", default="", type=hexadecimal)
    asked = parser.parse_args()
    about, *lines = map(json.loads, asked.rows.read_text().splitlines())
    found = {tuple(line["key"]): line for line in lines}
    rows = [
        {
            "collective": kind.removeprefix(DIRECTLY), "ranks": n, "bytes": size, "us": round(line["us"], 2),
            "spread": line["spread"], "library_us": _us(found, "link", kind, n, size),
            "beside_products_us": round(found["under", kind, n, size]["us"], 2),
            "library_beside_products_us": _us(found, "under", kind, n, size),
        }
        for (way, kind, *more), line in sorted(found.items(), key=str) if way == "link" and kind in DIRECT
        for n, size in [more]
    ]  # fmt: skip
    record: dict[str, Any] = {
        "case": "collectives by reading", **provenance("python benchmarks/direct_links.py", asked.commit),
        **{key: about[key] for key in ("device", "torch", "cuda")}, "rows": rows,
    }  # fmt: skip
    print(json.dumps(record, indent=1))


def _us(found: dict[tuple[Any, ...], dict[str, Any]], way: str, kind: str, n: int, size: int) -> float:
    return round(found[way, kind.removeprefix(DIRECTLY), n, size]["us"], 2)


if __name__ == "__main__":
    main()

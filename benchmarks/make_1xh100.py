"""The measured rates of an H100 as a TOML file of the catalogue: the file that `penteract calibrate` wrote, with what the host
needs for a call, which was measured beside H200s.

    python benchmarks/make_1xh100.py benchmarks/results/calibrated_h100.json src/penteract/config/catalog/hardware/8xh200.toml \
        > src/penteract/config/catalog/hardware/1xh100.toml

The first is made of a calibration and of steps that a GPU of this kind took:

    python benchmarks/make_1xh100.py --record h100.toml h100.rows.jsonl --commit HASH A1.json …
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from beside_sides import CASES
from provenance import hexadecimal, provenance

from penteract.config.catalog import model as find_model
from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.run import Precision
from penteract.readings.estimator import Estimator

HEADER = "# Measured curves of an NVIDIA H100 (SXM). Written by benchmarks/make_1xh100.py; not edited by hand.\n"


def toml(calibrated: dict[str, Any], node: str) -> str:
    """The file. `node`: that of the H200s; what their hosts need for a call is written there at the end of the links."""
    own = calibrated["file"][: calibrated["file"].index("\n# Microseconds of the host")]
    host = node[node.index("\n# Microseconds of the host") : node.index("\n# MiB of a process")]
    about = "".join(f"# {line}\n" for line in textwrap.wrap(calibrated["about"], 118))
    return HEADER + about + with_lengths(own) + host.rstrip() + "\n"


def with_lengths(text: str) -> str:
    """A file whose rows of attention have sequence lengths. `calibrate` once wrote them only into the comments."""
    text = text.replace(
        "causal half, head size, TFLOP/s of it, of the",
        "causal half, head size, sequence length,\n# TFLOP/s of it, of the",
    )
    return re.sub(r"(?m)^  \[(\d+, \d+), ([\d.]+, [\d.]+\],  # batch .*, sequence )(\d+)$", r"  [\1, \3, \2\3", text)


def planned(name: str, layout: dict[str, Any], file: Path) -> float:
    """Milliseconds of a step of a case, by the rates of a file."""
    case = CASES[name]
    found = find_model(case.model)
    spec = replace(found, **case.changes, **{n: replace(getattr(found, n), **c) for n, c in case.parts.items()})
    cut = Layout(**{k: tuple(v) if isinstance(v, list) else v for k, v in layout.items()})
    policy = Precision(dtype=case.precision, gradient="fp32").policy
    prices = Estimator(spec, cluster(str(file)), case.sequence_length, precision=policy)
    return round(1e3 * prices.time(prices.estimate(cut)).seconds, 1)


def record(asked: argparse.Namespace) -> dict[str, Any]:
    """Rows of the calibration, its file, and the steps with what plans say of them."""
    about, *rows = map(json.loads, Path(asked.files[1]).read_text().splitlines())
    steps = {Path(path).stem: json.loads(Path(path).read_text()) for path in asked.files[2:]}
    return {
        "case": "penteract calibrate on an H100", **provenance("python benchmarks/make_1xh100.py", asked.commit),
        "device": about["device"], "torch": about["torch"], "about": asked.about,
        "steps": {
            name: {
                "median_ms": round(found["median_ms"], 1), "spread_ms": [round(x, 1) for x in found["spread_ms"]],
                "tok_s_gpu": round(found["tok_s_gpu"]), "losses": found["losses"],
                "planned_ms": planned(name, found["layout"], Path(asked.files[0])),
            }
            for name, found in steps.items()
        },
        "file": Path(asked.files[0]).read_text(),
        "rows": [[*row["key"], row["us"]] for row in rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--about", default="", help="with --record: which cards and commits its rows and steps are of")
    asked = parser.parse_args()
    if asked.record:
        print(json.dumps(record(asked), indent=1))
        return
    calibrated, node = asked.files
    print(toml(json.loads(Path(calibrated).read_text()), Path(node).read_text()), end="")


if __name__ == "__main__":
    main()

"""Twelve drawn layouts of eight ranks, rehearsed and run: every call on a wire in order, and every byte, are equal.

Run by `make test-all`, which leaves the result in benchmarks/results/rehearsed_12.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from asked_long import commit
from drawn_runs import RANKS, drawn
from measure.rehearse.true_run import differences
from penteract.config.run import RunSpec
from pool import Pool

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "rehearsed_12.json"
LAYOUTS = 12


def row(pool: Pool, spec: RunSpec) -> dict[str, object]:
    """What was run, and where the rehearsal of a rank differs from it."""
    found = pool.run(differences, spec)
    lay = spec.layout
    row: dict[str, object] = {
        **{name: getattr(lay, name) for name in ("dp", "tp", "pp", "cp", "ep", "vpp", "schedule", "zero", "recompute")},
        "experts": spec.model.moe is not None, "precision": spec.precision.dtype, "optimizer": spec.optimizer.kind,
        "differences": [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines],
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> int:
    pool = Pool(RANKS)
    try:
        rows = [row(pool, spec) for spec in drawn(LAYOUTS)]
    finally:
        pool.close()
    record = {
        "command": "python tests/rehearsed_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d"),
        "layouts": len(rows), "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [row for row in rows if row["differences"]]
    print(wrong or f"{len(rows)} rehearsals are the run")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

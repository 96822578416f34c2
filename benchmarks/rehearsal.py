"""What a rehearsal of 405B on 4,096 GPUs takes: CPU seconds and the most memory of one process, by layout.

    penteract plan llama-3.1-405b --gpus 512x8xH100 --seq 8192 --batch 16Mi --out 405b.toml
    python benchmarks/rehearsal.py 405b.toml …

Each file is rehearsed in a fresh process, rank 2317 with the ranks that it is held against. The record is
benchmarks/results/rehearsal.json.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, provenance

RECORD = Path(__file__).parent / "results" / "rehearsal.json"


def measured(file: str) -> dict[str, object]:
    command = [sys.executable, "-m", "penteract", "rehearse", file, "--gpus", "512x8xH100", "--rank", "2317", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = json.loads(done.stdout)
    return {
        "layout": made["layout"],
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "most_gib": round(after.ru_maxrss / 2**20, 2),
        "mismatches": made["mismatches"],
        "peak": made["ranks"][0]["peak"],
        "held_against": made["held_against"],
    }


if __name__ == "__main__":
    rows = [measured(str(Path(file).resolve())) for file in sys.argv[1:]]
    RECORD.write_text(json.dumps({**provenance("python benchmarks/rehearsal.py"), "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))

"""Runs that a GPU has no memory for: what they print, and whether the first change that they name trains.

    python benchmarks/out_of_memory.py --out FILE.json [--tries micro_batch,sequence] [--hold 0.7]

Each try is `penteract train` in a process of its own, once as it is (it must end with exit code 71 and one line) and once
with the options of the first change in that line (it must train two steps). `other_process` holds a share of the GPU in
another process; `no_zero` needs two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal, provenance
from train_run import TrainRun

LIMIT = 120.0  # seconds of a run
TRIES: dict[str, tuple[str, ...]] = {
    "micro_batch": ("--preset=llama-3.2-1b", "batch.sequence_length=4096", "batch.micro_batch_size=64", "batch.global_batch_size=64"),
    "sequence": ("--preset=llama-3.2-1b", "data.validation_fraction=0", "batch.sequence_length=131072", "batch.micro_batch_size=1", "batch.global_batch_size=1"),
    "no_recomputation": ("--preset=llama-3.2-1b", "model.layers=64", "batch.sequence_length=8192", "batch.micro_batch_size=2",
                         "batch.global_batch_size=2"),
    "other_process": ("--preset=llama-3.2-1b", "batch.sequence_length=4096", "batch.micro_batch_size=4", "batch.global_batch_size=4"),
    "no_zero": ("--preset=llama-3.1-8b", "model.layers=40", "parallel.dp=2", "parallel.zero=0", "batch.sequence_length=4096",
                "batch.micro_batch_size=1", "batch.global_batch_size=2"),
}  # fmt: skip
HOLD = """
import sys, time, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(float(sys.argv[1]) * total), dtype=torch.uint8, device="cuda")
print("held", held.numel(), flush=True)
time.sleep(600)
"""


def train(words: list[str], folder: Path) -> dict[str, Any]:
    """`penteract train WORDS` until its second step is done or it ends: its exit code (None after two steps), its error
    lines and seconds."""
    run = TrainRun(folder, ["--steps", "3", *words], 2, limit=LIMIT)
    shutil.rmtree(folder, ignore_errors=True)
    errors = [line for line in run.lines if line.startswith("error[")]
    return {"words": words, "exit_code": run.code, "errors": errors, "took_s": round(run.took, 1),
            "last": run.lines[-1] if run.code is None else run.lines[-8:] if run.code != 71 else ""}  # fmt: skip


def tried(name: str, hold: float, folder: Path) -> dict[str, Any]:
    """One try, and the run with its first change."""
    holder = None
    if name == "other_process":
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(hold)], stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()
    try:
        row: dict[str, Any] = {"try": name, "as_it_is": train([*TRIES[name]], folder)}
        fix = re.search(r"fix: ((?:--\S+ \S+ )+)\(", " ".join(row["as_it_is"]["errors"]))
        if fix:
            row["with_the_first_change"] = train([*TRIES[name], *fix[1].split()], folder)
        return row
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tries", default=",".join(TRIES))
    parser.add_argument("--hold", type=float, default=0.7, help="share of the GPU that the other process holds")
    parser.add_argument("--commit", default="", type=hexadecimal)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    record: dict[str, Any] = {**provenance("python benchmarks/out_of_memory.py", args.commit), "rows": []}
    for name in args.tries.split(","):
        record["rows"].append(tried(name, args.hold, args.out.parent / "runs"))
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["rows"][-1])[:1500], flush=True)


if __name__ == "__main__":
    main()

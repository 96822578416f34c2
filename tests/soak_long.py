"""Ten thousand steps with a save in the background every 20: memory, descriptors and threads stay as they are.

    python tests/soak_long.py [--steps N]

A very small model on one rank, through the session that `penteract train` has. Each 500 steps the process and its
writer are measured. Run by `make test-all`; writes benchmarks/results/soak_10000.json. Exit status 1: something grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from asked_long import commit
from penteract._version import __version__
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.checkpoint import committed
from penteract.engine.rank.rank import Rank
from penteract.engine.session.session import Session, SessionOptions
from penteract.engine.session.trainer import Trainer
from penteract.units import MIB

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "soak_10000.json"
STEPS, EVERY, SAVE = 10_000, 500, 20
WARM = 2_000  # steps after which nothing may grow
MOST_MIB = 8.0  # resident memory that may come and go
WORDS = (
    "--training.sample_tokens=0", "--training.validation_every=0", f"--checkpoint.every={SAVE}",
    "--checkpoint.asynchronous=true", "--batch.sequence_length=16", "--batch.global_batch_size=1",
    "--batch.micro_batch_size=1", "--model.layers=1", "--model.hidden_size=32", "--model.heads=2", "--model.kv_heads=1",
    "--model.head_size=16", "--model.ffn_size=32", "--precision.device=cpu",
)  # fmt: skip
Sample = dict[str, Any]


def resident(pid: int | str) -> float:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 2)


def sample(step: int, made: Session) -> Sample:
    """What this process and its writer have now."""
    gc.collect()
    background = made.saver.background
    assert background is not None
    writer = background.writer.process
    return {
        "step": step, "resident_mib": resident("self"), "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")), "saves": background.number,
        "writer_resident_mib": resident(writer.pid) if writer is not None else 0.0,
        "writer_descriptors": len(os.listdir(f"/proc/{writer.pid}/fd")) if writer is not None else 0,
    }  # fmt: skip


def trained(folder: Path, steps: int) -> list[Sample]:
    """Train, with a sample each so many steps, when no save is under way."""
    words = [f"--output.folder={folder}", f"--training.steps={steps}", *WORDS]
    run = resolve(None, "tiny", words, world=1).run
    made, found = Session(run, Rank(0, 1, torch.device("cpu"), None), SessionOptions(folder)), list[Sample]()
    made.open()
    start = Trainer.start

    def begun(self: Trainer, number: int, *about: Any) -> Any:
        if number % EVERY == 1 and number > 1:
            assert made.saver.background is not None
            made.saver.background.finish()
            read_back = made.checkpoints.before
            if read_back is not None and read_back.read_back is not None:
                read_back.read_back.result()
            found.append(sample(number - 1, made))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        return start(self, number, *about)

    Trainer.start = begun  # type: ignore[method-assign]
    made.go()
    assert committed(folder / "checkpoints")[0].step == steps
    return found


def growing(samples: list[Sample]) -> list[str]:
    """What grows after the first steps."""
    late = [row for row in samples if row["step"] >= WARM]
    names = ("descriptors", "threads", "writer_descriptors")
    found = [n for n in names if max(row[n] for row in late[-4:]) > max(row[n] for row in late[:4])]
    for name in ("resident_mib", "writer_resident_mib"):
        amounts = [row[name] for row in late]
        found += [name] * (max(amounts[-4:]) - min(amounts[:4]) > MOST_MIB)
    return found


def main() -> int:
    """Train, and write the record."""
    parser = argparse.ArgumentParser(description="Ten thousand steps with flat memory.")
    parser.add_argument("--steps", type=int, default=STEPS)
    steps, began = parser.parse_args().steps, time.monotonic()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    logging.getLogger("penteract").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        out, sys.stdout = sys.stdout, nothing
        try:
            samples = trained(Path(folder), steps)
        finally:
            sys.stdout = out
    found = growing(samples)
    record = {
        "command": "python tests/soak_long.py", "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"penteract": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "steps": steps, "saves": samples[-1]["saves"], "growing": found, "samples": samples,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{steps} steps, {record['saves']} saves in the background: {', '.join(found) or 'nothing'} grows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

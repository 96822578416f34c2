"""What comparing replicas costs a run of two GPUs (`training.replica_check_every`).

    torchrun --nproc-per-node 2 benchmarks/replica_checks.py --out OUT.json [--rounds 6]

A 1B model trains with data parallelism of 2, at ZeRO 0 (all state has a replica) and at ZeRO 1 (moments have none, and are
summed up twice). Blocks of `EVERY` steps alternate: none of a block is checked, or the one in its middle. `check_s`: what a
block with a check took longer, in the median of all pairs. The wait for the step that is checked is part of it, as in a run.
`--device cpu --model tiny` tries the script without GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from checkpoint_kinds import fast_kernels
from measuring import run_parts
from provenance import hexadecimal, provenance

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.session import Session, SessionOptions

EVERY = 8  # steps of a block
DEFAULT = 100  # steps between two checks of a run that does not say


class Blocks:
    """Blocks of steps of one run."""

    def __init__(self, asked: argparse.Namespace, rank: Rank, zero: int, folder: Path) -> None:
        length = 1024 if asked.device == "cpu" else 4096
        words = [
            f"--output.folder={folder}", "--training.sample_tokens=0", "--training.validation_every=0",
            f"--batch.sequence_length={length}", "--batch.global_batch_size=4", "--batch.micro_batch_size=2",
            "--parallel.dp=2", f"--parallel.zero={zero}", "--training.steps=100000", "--checkpoint.every=99999",
            "--training.replica_check_every=0", "--checkpoint.asynchronous=false", "--data.pack_documents=false",
            f"--precision.device={asked.device}", "--precision.dtype=bf16", *fast_kernels(asked.device, asked.model),
        ]  # fmt: skip
        self.session = Session(resolve(None, asked.model, words, world=2).run, rank, SessionOptions(folder))
        self.session.open()
        self.number = 0

    def seconds(self, *, checked: bool) -> float:
        """Of one block, until the device is done."""
        session, pending = self.session, None
        begun = time.perf_counter()
        for step in range(EVERY):
            self.number += 1
            first = self.number * session.spec.layout.global_batch_size
            outcome = session.trainer.start(self.number, session.train, first)
            if pending is not None:
                assert math.isfinite(pending().loss)
            pending = outcome
            if checked and step == EVERY // 2:
                assert math.isfinite(pending().loss)
                session.saver.check(self.number)
                pending = None
        assert pending is not None and math.isfinite(pending().loss)
        session.rank.largest(torch.zeros(()))
        return time.perf_counter() - begun


def cost(asked: argparse.Namespace, rank: Rank, zero: int, folder: Path) -> dict[str, Any]:
    """The cost of a check at a stage of ZeRO."""
    blocks = Blocks(asked, rank, zero, folder)
    for checked in (False, True, False):  # kernels are compiled, memory is taken
        blocks.seconds(checked=checked)
    pairs = list[tuple[float, float]]()
    for number in range(asked.rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        took = {checked: blocks.seconds(checked=checked) for checked in order}
        pairs.append((took[False], took[True]))
    step = median(without for without, _ in pairs) / EVERY
    check = median(with_one - without for without, with_one in pairs)
    blocks.session.saver.close()
    return {"step_s": round(step, 5), "check_s": round(check, 5), "blocks_s": [[round(s, 5) for s in p] for p in pairs],
            "share_of_time": round(check / (DEFAULT * step), 6)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", type=hexadecimal, default="")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    rank = join(os.environ, asked.device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shared = Path(folder)
        found = run_parts(
            "checks",
            {f"zero_{zero}": lambda zero=zero: cost(asked, rank, zero, shared / str(zero)) for zero in (0, 1)},
        )
    if rank.number == 0:
        name = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
        record = {**provenance("torchrun benchmarks/replica_checks.py", asked.commit), "model": asked.model,
                  "device": name, "torch": torch.__version__, "steps_of_a_block": EVERY, **found}  # fmt: skip
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

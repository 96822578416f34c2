"""Two GPUs: a step with tensor parallelism by its length, with each kind of collectives (`kernels.collectives`).

    torchrun --nproc-per-node 2 benchmarks/collectives_by_length.py OUT.json

Kinds take turns, twice, each time with a new trainer. `ms`: the median of each turn's steps; `planned_ms`: of the plan, which
chooses where nobody does. A short step waits for the host.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from beside_ours import RandomBatches, predicted, run_of
from beside_sides import CASES, Case
from provenance import provenance

from penteract.config.layout import COLLECTIVES
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.trainer import Outcome, Trainer

MODELS = {"llama-3.2-1b": 16, "llama-3.1-8b": 8}  # with so many layers
TOKENS = (512, 1024, 2048, 4096, 8192)
TURNS, WARM, TIMED = 2, 8, 20


def turn(case: Case, kind: str, rank: Rank) -> dict[str, Any]:
    """The steps of one trainer."""
    run = run_of(case, {"collectives": kind}, {})
    trainer, samples, size = Trainer.build(run, rank), RandomBatches(case), run.layout.global_batch_size
    ends, losses, pending = list[torch.cuda.Event](), list[float](), list[Callable[[], Outcome]]()
    with collected_between_steps():
        for n in range(1, WARM + TIMED + 2):
            pending.append(trainer.start(n, samples, (n - 1) * size))
            collect_after(n)
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if n > 1:
                losses.append(pending.pop(0)().loss)
        losses.append(pending.pop(0)().loss)
    torch.cuda.synchronize()
    took = [a.elapsed_time(b) for a, b in pairwise(ends[WARM:])]
    return {"ms": median(took), "least_ms": min(took), "losses": [losses[0], losses[-1]], **predicted(run)}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    rank, rows = join(os.environ, "cuda"), list[dict[str, Any]]()
    for model, layers in MODELS.items():
        for tokens in TOKENS:
            case = replace(
                CASES["tp2"], model=model, changes={"layers": layers}, sequence_length=tokens, micro_batch_size=1
            )
            row: dict[str, Any] = {"model": model, "layers": layers, "tokens": tokens, "kinds": {}}
            for kind in COLLECTIVES * TURNS:
                row["kinds"].setdefault(kind, []).append(turn(case, kind, rank))
                gc.collect()
                torch.cuda.empty_cache()
            rows.append(row)
            if rank.number == 0:
                told = {kind: [round(t["ms"], 1) for t in turns] for kind, turns in row["kinds"].items()}
                print(model, tokens, told, flush=True)
                record = provenance("torchrun --nproc-per-node 2 benchmarks/collectives_by_length.py")
                record |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
                out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

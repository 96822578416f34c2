"""Experts of two ranks where no token comes to one of them: padded rows beside exact ones.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/empty_rank.py --out OUT.json [--commit HASH] [--device cpu]
        [--method all_gather] [--determinism off]

Routers' biases shut out the experts of a rank (`shut`; -1: of none). Each layout takes `STEPS` steps with the same
batches: losses and gradient norms with both sizes, how many rows came to this rank, and the steps that were repeated, as
copies did not fit the blocks of an all-to-all. Each rank writes a file. On a GPU attention adds gradients in any order,
so last bits differ, but with determinism "bitwise"; on a CPU, which has a small model, they are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from beside_ours import RandomBatches
from beside_sides import CASES, Case
from provenance import hexadecimal, provenance

from penteract.config.catalog import model as find_model
from penteract.config.layout import DETERMINISM, EP_METHODS, EXPERT_ROWS, ExpertRows, Layout
from penteract.config.run import Data, LearningRateSchedule, Optimizer, Precision, RunSpec, Training
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.trainer import Trainer

STEPS = 4
_SHARED: dict[str, Any] = {"dp": 2, "ep": 2, "zero": 1}
_GPU: dict[str, Any] = {"elementwise": "triton", "attention": "fa4", "experts": "quack",
                        "fuse": ("norm", "add", "mlp", "qkv", "loss", "glu")}  # fmt: skip


def run_of(case: Case, rows: ExpertRows, recompute: tuple[str, ...], device: str, more: dict[str, Any]) -> RunSpec:
    """Two layers, of a small model on a CPU."""
    model = replace(find_model(case.model), layers=2)
    assert model.moe is not None
    moe = replace(model.moe, score="sigmoid", balance="bias")
    if device == "cpu":
        model, moe = replace(model, hidden_size=64, heads=4, kv_heads=2, head_size=16), replace(moe, experts=16)
    kernels = _GPU if device == "cuda" else {"experts": "grouped"}
    layout = Layout(**_SHARED, **kernels, **more, micro_batch_size=case.micro_batch_size, gradient_accumulation_steps=2,
                    loss="chunked", expert_rows=rows, recompute=recompute)  # fmt: skip
    return RunSpec(
        model=replace(model, moe=moe), layout=layout, sequence_length=case.sequence_length, train=Training(steps=100),
        precision=Precision(dtype="bf16", gradient="fp32"), data=Data(pack_documents=False),
        optimizer=Optimizer(learning_rate=1e-4), lr_schedule=LearningRateSchedule(warmup_steps=2),
    )  # fmt: skip


def steps(case: Case, run: RunSpec, rank: Rank, shut: int) -> dict[str, Any]:
    """The losses and norms of a few steps, and the rows of the last."""
    samples, trainer, found = RandomBatches(case), Trainer.build(run, rank), list[tuple[float, float]]()
    size, repeated = run.layout.global_batch_size, list[int]()
    if trainer.repeated is not None:
        trainer.repeated.warn = lambda number, _: repeated.append(number)
    for number in range(1, STEPS + 1):
        for bias in trainer.state.biases.values():
            bias.zero_()
            if shut >= 0:
                bias.view(2, -1)[shut] = -10
        made = trainer.start(number, samples, (number - 1) * size)()
        found.append((made.loss, made.norm))
    return {"steps": found, "rows": sorted({*trainer.run.received.values()}), "repeated": repeated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--method", default="all_gather", choices=EP_METHODS)
    parser.add_argument("--determinism", default="off", choices=DETERMINISM)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    rank, length = join(os.environ, asked.device), 2048 if asked.device == "cuda" else 64
    case = replace(CASES["F4"], gpus=2, micro_batch_size=2, sequence_length=length, layout=_SHARED)
    cases, more = list[dict[str, Any]](), {"ep_method": asked.method, "determinism": asked.determinism}
    for recompute in ((), ("*",)):
        for shut in (-1, 0, 1):
            both: dict[str, Any] = {}
            for rows in EXPERT_ROWS:
                both[rows] = steps(case, run_of(case, rows, recompute, asked.device, more), rank, shut)
                if asked.device == "cuda":
                    torch.cuda.empty_cache()
            cases.append({"rank": rank.number, "recompute": recompute, "shut": shut, **both})
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    record = {"case": "experts of two ranks of which one may have no rows", "device": name, "torch": torch.__version__, **more,
              **provenance("python -m torch.distributed.run --nproc-per-node 2 benchmarks/empty_rank.py", asked.commit)}  # fmt: skip
    asked.out.with_suffix(f".{rank.number}.json").write_text(json.dumps({**record, "cases": cases}, indent=1))
    rank.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

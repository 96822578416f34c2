"""Our side of `beside_torchtitan.py`, in a process of its own.

python benchmarks/beside_ours.py CASE OUT.json ['{"attention": "cudnn"}' ['{"gradient": "bf16"}']]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import numpy as np
import torch
from beside_sides import CASES, DRAWN, RATE, STEPS, WARM, Case, Clock, batches, leave

from penteract.config.catalog import model as find_model
from penteract.config.expert_kernels import expert_packages, fastest_experts
from penteract.config.hardware import cluster
from penteract.config.kernel_limits import fastest_attention, installed_packages
from penteract.config.layout import FUSIONS, Layout
from penteract.config.model import ModelSpec
from penteract.config.run import Data, LearningRate, Optimizer, Precision, RunSpec, Training
from penteract.engine.data.pack import Sample
from penteract.engine.runtime.rank import join
from penteract.engine.session.trainer import Outcome, Trainer
from penteract.readings.estimator import Estimator
from penteract.units import gib


class Drawn:
    """The batches that the other side has too, as samples: each sequence is one document."""

    def __init__(self, case: Case) -> None:
        place = np.arange(case.sequence_length, dtype=np.int64)
        rows = [row.numpy() for batch in batches(case) for row in batch]
        self.samples = [Sample(row[:-1].copy(), row[1:].copy(), np.zeros_like(place), place) for row in rows]

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]


def model_of(case: Case) -> ModelSpec:
    found = find_model(case.model)
    parts: Any = {name: replace(getattr(found, name), **changes) for name, changes in case.parts.items()}
    return replace(found, **case.changes, **parts)


def run_of(case: Case, layout: dict[str, Any], precision: dict[str, Any]) -> RunSpec:
    """Gradients are fp32, as the other side's. `layout`, `precision`: what is otherwise than usual."""
    model = model_of(case)
    numbers = Precision(**({"dtype": case.precision, "gradient": "fp32"} | precision))
    usual: dict[str, Any] = {
        "micro_batch_size": case.micro_batch_size, "loss": "chunked", "elementwise": "triton",
        "attention": fastest_attention(model, 1, "all_gather", numbers.policy, installed_packages(),
                                       capability=torch.cuda.get_device_capability()),
        "experts": fastest_experts(model, Layout(), numbers.policy, expert_packages(),
                                   capability=torch.cuda.get_device_capability()),
        "fuse": FUSIONS,
    }  # fmt: skip
    asked = {key: tuple(value) if isinstance(value, list) else value for key, value in layout.items()}
    return RunSpec(
        model=model, layout=Layout(**(usual | asked)), sequence_length=case.sequence_length, precision=numbers,
        data=Data(pack_documents=False), optimizer=Optimizer(learning_rate=RATE),
        schedule=LearningRate(warmup_steps=WARM), train=Training(steps=10_000),
    )  # fmt: skip


def predicted(run: RunSpec) -> dict[str, Any]:
    """What a plan says of this run on this card."""
    card = next(f"1x{name}" for name in ("H200", "H100", "A100") if name in torch.cuda.get_device_name())
    kinds = run.optimizer.optimizer_kinds
    estimator = Estimator(
        run.model, cluster(card), run.sequence_length, precision=run.precision.policy, optimizer_kinds=kinds
    )
    estimate = estimator.estimate(run.layout)
    return {"planned_ms": 1e3 * estimator.time(estimate).seconds, "planned_gib": gib(estimate.allocated)}


def main() -> None:
    name, out, *more = sys.argv[1:]
    case = CASES[name]
    torch.set_grad_enabled(False)
    rank = join({}, "cuda")
    run = run_of(case, *(json.loads(text) for text in (*more, "{}", "{}")[:2]))
    told = predicted(run)
    samples, trainer = Drawn(case), Trainer.build(run, rank)
    assert len(samples.samples) == DRAWN * case.micro_batch_size
    clock, losses, late = Clock(), list[float](), list[Callable[[], Outcome]]()
    for n in range(1, STEPS + 1):
        late.append(trainer.start(n, samples, (n - 1) * case.micro_batch_size))
        clock.mark()
        if n > 1:
            losses.append(late.pop(0)().loss)
    losses.append(late.pop(0)().loss)
    numbers = run.precision.policy
    leave(clock.report(case, losses, gradient=numbers.gradient, layout=asdict(run.layout), **told), Path(out))


if __name__ == "__main__":
    main()

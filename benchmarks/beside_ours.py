"""Our side of `beside_torchtitan.py`: one run, in a process of its own.

    python benchmarks/beside_ours.py CASE OUT.json ['{"attention": "cudnn"}' ['{"gradient": "bf16"}' [3]]]

The optional arguments change fields of the layout and of the precision, and say how many steps to profile after those that are
timed (`beside_waits.py`); 0: none. The record is there before they begin: without them it says why (`not_profiled`).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import numpy as np
import torch
from beside_sides import CASES, DRAWN, UNFINISHED, WARM, Case, Clock, batches, write_record
from beside_waits import ended_after, limit_of, profile_steps

from penteract.config.catalog import model as find_model
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.expert_kernels import fastest_experts, fastest_rows
from penteract.config.rules.kernel_limits import FA4, QUACK, fastest_attention, fastest_fusions, installed_packages
from penteract.config.run import Data, LearningRateSchedule, Optimizer, Precision, RunSpec, Training
from penteract.engine.data.pack import Sample
from penteract.engine.device.device import device_of
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.trainer import Trainer
from penteract.parallel import direct
from penteract.readings.estimator import Estimator
from penteract.units import gib


class RandomBatches:
    """The batches of both sides, as samples. Documents that share a sequence are of the same length."""

    def __init__(self, case: Case) -> None:
        index = np.arange(case.sequence_length, dtype=np.int64)
        start = index - index % (case.sequence_length // max(case.documents, 1))
        ranks = [batches(case, number) for number in range(case.data_ranks)]
        rows = [row.numpy() for batch in zip(*ranks, strict=True) for part in batch for row in part]
        self.samples = [Sample(row[:-1].copy(), row[1:].copy(), start, index - start) for row in rows]

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]


def model_of(case: Case) -> ModelSpec:
    """The model of a case."""
    found = find_model(case.model)
    parts: Any = {name: replace(getattr(found, name), **changes) for name, changes in case.parts.items()}
    return replace(found, **case.changes, **parts)


def run_of(case: Case, layout: dict[str, Any], precision: dict[str, Any]) -> RunSpec:
    """The run of a case. Gradients are fp32, as in torchtitan. `layout`, `precision`: fields to change."""
    model, cut = model_of(case), Layout(**case.layout)
    parts = Precision(**({"dtype": case.precision, "gradient": "fp32", **case.our_precision} | precision))
    direct_ones = device_of(torch.device("cuda")).reads_peers and direct.axes(cut.put(collectives="direct"))
    defaults: dict[str, Any] = {
        "micro_batch_size": case.micro_batch_size, "loss": "chunked", "elementwise": "triton",
        "attention": fastest_attention(model, cut, parts.policy, installed_packages(FA4),
                                       capability=torch.cuda.get_device_capability(), documents=case.documents > 0),
        "experts": fastest_experts(model, cut, parts.policy, installed_packages(QUACK),
                                   capability=torch.cuda.get_device_capability()),
        "fuse": fastest_fusions(model, cut, parts.policy, installed_packages(QUACK),
                                capability=torch.cuda.get_device_capability()),
        "collectives": "overlapped" if direct_ones else "library",
    }  # fmt: skip
    given = {**case.layout, **layout}
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    whole = Layout(**(defaults | changes))
    if "expert_rows" not in given:
        whole = whole.put(expert_rows=fastest_rows(model, whole, parts.policy))
    return RunSpec(
        model=model, layout=whole, sequence_length=case.sequence_length, precision=parts,
        data=Data(pack_documents=case.documents > 0), optimizer=Optimizer(learning_rate=case.rate),
        lr_schedule=LearningRateSchedule(warmup_steps=WARM), train=Training(steps=10_000),
    )  # fmt: skip


def gpus_of(run: RunSpec) -> Cluster:
    """As many GPUs as the run has, of this one's kind."""
    kinds = ("H200", "H100", "A100")
    return cluster(next(f"{run.layout.world}x{name}" for name in kinds if name in torch.cuda.get_device_name()))


def predicted(run: RunSpec) -> dict[str, Any]:
    """Planned time and memory of this run on this GPU."""
    estimator = Estimator.of_run(run, gpus_of(run))
    estimate = estimator.estimate(run.layout)
    return {"planned_ms": 1e3 * estimator.time(estimate).seconds, "planned_gib": gib(estimate.allocated)}


def write_with_profile(
    record: Mapping[str, Any], out: Path, rank: Rank, profile: Callable[[], dict[str, Any]], limit: float
) -> None:
    """Write the record, then again with what `profile` finds, or with why it found nothing. A rank that fails ends at
    once, and so the launcher the others: these may wait for it in a collective. All end after `limit` seconds."""
    if rank.number == 0:
        write_record({**record, "not_profiled": UNFINISHED}, out)
    rank.barrier()  # a rank that fails writes after that
    try:
        with ended_after(limit):
            found = profile()
            rank.barrier()  # who fails until here is named in the record
        if rank.number == 0:
            write_record({**record, "profile": found}, out)
    except Exception as error:
        traceback.print_exc()
        why = " ".join(f"rank {rank.number}: {type(error).__name__}: {error}".split())[:300]
        write_record({**record, "not_profiled": why}, out)
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    name, out, *more = sys.argv[1:]
    case = CASES[name]
    torch.set_grad_enabled(False)
    rank = join(os.environ if case.gpus > 1 else {}, "cuda")
    layout, precision, most = (*more, *("{}", "{}", "3")[len(more) :])
    run = run_of(case, json.loads(layout), json.loads(precision))
    plan = predicted(run)
    samples, trainer = RandomBatches(case), Trainer.build(run, rank)
    size = run.layout.global_batch_size
    assert len(samples.samples) == DRAWN * size
    clock, losses, pending = Clock(case), list[float](), list[Callable[[], Outcome]]()
    with collected_between_steps():
        for n in range(1, case.steps + 1):
            pending.append(trainer.start(n, samples, (n - 1) * size))
            collect_after(n)
            clock.mark()
            if n > 1:
                losses.append(pending.pop(0)().loss)
    losses.append(pending.pop(0)().loss)
    gradient = run.precision.policy.gradient
    record = clock.report(losses, "cpu", gradient=gradient, layout=asdict(run.layout), **plan)
    if int(most):
        step_ms = record["median_ms"]
        more_steps = partial(
            profile_steps, trainer, samples, gpus_of(run), done=case.steps, step_ms=step_ms, most=int(most)
        )
        write_with_profile(record, Path(out), rank, more_steps, limit_of(step_ms, int(most)))
    elif rank.number == 0:
        write_record(record, Path(out))


if __name__ == "__main__":
    main()

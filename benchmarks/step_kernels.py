"""One GPU: the kernels of a step by the parts of its program, beside their planned time, FLOPs and memory traffic.

    python benchmarks/step_kernels.py --out FILE.json [--cases A1,A1:plain,B1] [--commit HASH]

Each case (`beside_sides.py`; `D1` to `D6`: `drawn_shapes.py`) runs in a process of its own: steps as in
`beside_torchtitan.py`, then four under torch's profiler, of which the third is summed up. FILE.json is written after each case. `CASE:plain` is the same step as PyTorch
has it: no fused ops, plain elementwise kernels, cuDNN's attention, experts one by one. The record's `ceilings` are what
this card does at its best: FLOP/s of one large product of random bf16 numbers, sustained, and bytes/s of a copy. A row
has

step_ms   median of ten steps without a profiler; `profiled_ms`: the profiled step
idle_ms   time of the profiled step in which no kernel ran, and its longest gaps
parts     for each part of the program, in the order of its first kernel: the number of its calls, milliseconds of its
          kernels, the planned milliseconds, FLOPs, bytes that it has to move, and its kernels
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from beside_ours import RandomBatches, run_of
from beside_sides import CASES, MEASURED, STEPS, Clock
from drawn_shapes import read_cases
from measuring import seconds
from provenance import hexadecimal, provenance
from step_profile import kernels
from torch.profiler import ProfilerActivity, profile

from penteract.config.hardware import cluster
from penteract.config.run import RunSpec
from penteract.engine.executor.outcome import Outcome
from penteract.engine.executor.profiled import ProfiledExecutor
from penteract.engine.rank.rank import join
from penteract.engine.session import trainer as engine
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.trainer import Trainer
from penteract.measure.profile.planned_work import BytesOnly, FlopsOnly
from penteract.readings.costs.rates import Rates
from penteract.readings.estimator import Estimator
from penteract.readings.time.timelines.timeline import timeline
from penteract.step.walk import walk

PLAIN = {"fuse": [], "elementwise": "reference", "attention": "cudnn", "experts": "reference"}
OUTSIDE = "between the parts"  # kernels that no part launched: batches, the loss, the learning rate


# ---- planned -------------------------------------------------------------------------------------------------------------


def planned(run: RunSpec, rates: type[Rates] | None = None) -> Counter[str]:
    """Picoseconds of each part of the planned step: its compute, with the rates of this GPU or with `rates`."""
    gpus = next(f"1x{name}" for name in ("H200", "H100", "A100") if name in torch.cuda.get_device_name())
    made = Estimator.of_run(run, cluster(gpus))
    steps = made.steps
    if rates is not None:
        steps = replace(steps, rates=rates(**{f.name: getattr(steps.rates, f.name) for f in fields(Rates)}))
    found = Counter[str]()
    for event in timeline(steps, run.layout).of(0):
        if event.stream == "compute":
            found[event.name] += event.end - event.start
    return found


# ---- measured ------------------------------------------------------------------------------------------------------------


def steps_of(trainer: Trainer, samples: RandomBatches, clock: Clock) -> list[float]:
    """Losses of `STEPS` steps, each read a step late, as a run does."""
    losses, pending = list[float](), list[Callable[[], Outcome]]()
    size = trainer.spec.layout.global_batch_size
    for n in range(1, STEPS + 1):
        pending.append(trainer.start(n, samples, (n - 1) * size))
        collect_after(n)
        clock.mark()
        if n > 1:
            losses.append(pending.pop(0)().loss)
    return [*losses, pending.pop(0)().loss]


def profiled(trainer: Trainer, samples: RandomBatches) -> tuple[list[list[Any]], float]:
    """Kernels of the third of four profiled steps, in order: [stream, part, kernel, begin µs, duration µs]; and when the
    last kernel of the step before ended. Outcomes are read a step late, as in a run."""
    size = trainer.spec.layout.global_batch_size
    with patch.object(engine, "walk", lambda p, run, **how: walk(p, ProfiledExecutor(run), **how)):
        trainer.step(STEPS + 1, samples, STEPS * size)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            pending = list[Callable[[], Outcome]]()
            for n in range(STEPS + 2, STEPS + 6):
                with torch.profiler.record_function(f"step {n}"):
                    pending.append(trainer.start(n, samples, (n - 1) * size))
                if len(pending) > 1:
                    pending.pop(0)()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    asked = {e["name"]: e["ts"] for e in events if e.get("cat") == "user_annotation"}  # times count from there
    before, step = f"step {STEPS + 3}", f"step {STEPS + 4}"
    ended = max(begin + took for *_, begin, took in kernels(events, before))
    return kernels(events, step), ended + asked[before] - asked[step]


def gaps(rows: Iterable[Sequence[Any]], until: float) -> list[tuple[float, str]]:
    """Milliseconds in which no kernel ran, and the part after each of these times. `until`: of the step before."""
    found = list[tuple[float, str]]()
    for _, part, _, begin, took in rows:
        if begin > until:
            found.append(((begin - until) / 1e3, part or OUTSIDE))
        until = max(until, begin + took)
    return sorted(found, reverse=True)


def parts_of(rows: Iterable[Sequence[Any]], work: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """The field `parts` of a row. `work`: what is planned for each part."""
    by_part = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    for _, part, kernel, _, took in rows:
        by_part[part or OUTSIDE][kernel].append(took / 1e3)
    parts = [*by_part, *sorted({name for each in work.values() for name in each} - {*by_part})]
    return [
        {
            "part": part, "ms": round(sum(map(sum, by_part[part].values())), 4),
            "planned_ms": round(work["planned"].get(part, 0) / 1e9, 4),
            "flops": work["flops"].get(part, 0), "bytes": work["bytes"].get(part, 0),
            "kernels": {name: [len(ms), round(sum(ms), 4)] for name, ms in by_part[part].items()},
        } for part in parts if by_part[part] or work["planned"].get(part)
    ]  # fmt: skip


def row_of(name: str) -> dict[str, Any]:
    """The row of a case, measured in this process."""
    torch.set_grad_enabled(False)
    case, rank = (CASES | read_cases())[name.removesuffix(":plain")], join({}, "cuda")
    run = run_of(case, PLAIN if name.endswith(":plain") else {}, {})
    work = {"planned": planned(run), "flops": planned(run, FlopsOnly), "bytes": planned(run, BytesOnly)}
    samples, trainer, clock = RandomBatches(case), Trainer.build(run, rank), Clock(case)
    with collected_between_steps():
        losses = steps_of(trainer, samples, clock)
        report = clock.report(losses)
        rows, before = profiled(trainer, samples)
    end = max(r[3] + r[4] for r in rows)
    without = gaps(rows, before)
    return {
        "case": name, "layout": asdict(run.layout), "step_ms": report["median_ms"], "steps": MEASURED,
        "spread_ms": report["spread_ms"], "losses": losses, "profiled_ms": round((end - before) / 1e3, 3),
        "idle_ms": round(sum(ms for ms, _ in without), 3), "longest_gaps": [[round(ms, 4), p] for ms, p in without[:8]],
        "kernels": len(rows), "parts": parts_of(rows, work),
    }  # fmt: skip


def ceilings() -> dict[str, float]:
    """FLOP/s of a product, sustained for some seconds as in a step, and bytes/s that a copy reads and writes."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = seconds(lambda: [torch.mm(a, b) for _ in range(150)]) / 150
    x = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return {"flops": 2 * 8192**3 / product, "bytes": 2 * x.nbytes / seconds(lambda: y.copy_(x))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--commit", default="", type=hexadecimal)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a case that this process measures
    args = parser.parse_args()
    if args.one:
        args.out.write_text(json.dumps(row_of(args.one)))
        return
    record: dict[str, Any] = {
        "case": "kernels of a step by the parts of its program", **provenance("benchmarks/step_kernels.py", args.commit),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "ceilings": ceilings(), "rows": [],
    }  # fmt: skip
    for name in args.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            one = Path(folder) / "row.json"
            subprocess.run([sys.executable, __file__, "--one", name, "--out", str(one)], check=False)
            if not one.exists():
                continue  # its error was printed
            record["rows"].append(row := json.loads(one.read_text()))
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(name, f"{row['step_ms']:.1f} ms, idle {row['idle_ms']:.2f} ms", flush=True)


if __name__ == "__main__":
    main()

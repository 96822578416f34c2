"""One GPU: fused attention against the reference kernel: values, gradients, workspace, speed, and whole steps.

    python benchmarks/flash_attention.py --out FOLDER [--commit HASH] [--only calls,speed,llama-3.2-1b,...]

Writes FOLDER/flash_attention.json after each section. A section that fails writes its traceback instead.

Check (`held`): each result of a kernel is within `TOLERANCE` of the reference kernel in fp32 on the same bf16 inputs: the
norm of the difference over the norm. bf16 rounds results and attention weights by at most 2^-9, so rounding gives errors of
a few thousandths. A wrong mask, head or scale gives errors of some tenths. Log-sum-exps are fp32 and must be much closer.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / d) for d in ("src", "tests")]

import torch

from op_kernels.fused import LARGE, NAMES, Case, Trial
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve.presets import preset
from penteract.config.rules.kernel_limits import FA4, installed_packages
from penteract.config.run import Data, LearningRateSchedule, Optimizer
from penteract.engine.comm.distributed import Nccl
from penteract.engine.data import open_samples, open_tokenizer
from penteract.engine.executor.allocator import Arena
from penteract.engine.executor.cuda_graph import CapturedStep
from penteract.engine.executor.executor import Executor
from penteract.engine.executor.feed import constants, micro_batch, samples_of, target_counts
from penteract.engine.kernels.checks import check_documents, check_kernels
from penteract.engine.kernels.fused_attention import flash as flash_kernels
from penteract.engine.kernels.registry import kernels, kernels_by_call
from penteract.engine.optim.optimizer import AdamW
from penteract.engine.state.set_parameters import fill
from penteract.engine.state.state import allocate
from penteract.ops.declarations import declaration_of
from penteract.readings.price import price
from penteract.step.arena import plan_arena
from penteract.step.learning_rate import rate
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from penteract.units import gib

DEVICE = torch.device("cuda")
TOLERANCE = {"o": 1e-2, "log_sum": 1e-4, "q_gradient": 1.5e-2, "k_gradient": 1.5e-2, "v_gradient": 1.5e-2}
PHASES = {"forward": Trial.forward, "input_gradient": Trial.backward}
SPEED = Case(tokens=8192, heads=(32, 8), size=128)
SMALL = ModelSpec(
    name="small", layers=16, hidden_size=256, heads=4, kv_heads=2, head_size=64, ffn_size=512, vocab_size=264
)


# ---- one call --------------------------------------------------------------------------------------------------------


def relative_errors(got: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """For each result, the norm of the difference over its norm, which counts as 1e-3 at least. NaN stays NaN."""
    pairs = ((x.double(), y.double()) for x, y in zip(got, expected, strict=True))
    return {n: ((x - y).norm() / y.norm().clamp(min=1e-3)).item() for n, (x, y) in zip(NAMES, pairs, strict=True)}


def workspace(trial: Trial, phase: str, kernel: str) -> dict[str, Any]:
    """Bytes requested from the allocator at the peak of a call, and the declared ones."""
    kernel = kernels_by_call(Layout(attention=kernel), DEVICE)["attention"]  # type: ignore[arg-type]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kinds = {"measured": "requested_bytes.all", "measured_in_blocks": "allocated_bytes.all"}
    before = torch.cuda.memory_stats()
    PHASES[phase](trial, kernel)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    seen: dict[str, Any] = {n: after[f"{kind}.peak"] - before[f"{kind}.current"] for n, kind in kinds.items()}
    shapes = [s.shape for s in trial.site.ins]
    declared = declaration_of(trial.site, trial.case.plan)
    seen["declared"] = declared.workspace(phase, shapes, (), trial.site.attrs, RECIPES["bf16"].widths)  # type: ignore[arg-type]
    return seen | {"measured_less_declared": seen["measured"] - seen["declared"]}


def one_call(case: Case, packed: bool = False) -> dict[str, Any]:
    """Errors of the kernel, and of the reference kernel in bf16, against the reference kernel in fp32. `packed`: q, k and
    v are views of one register, and so are their gradients."""
    plain, kernel = kernels_by_call(Layout(), DEVICE)["attention"], kernels_by_call(case.plan, DEVICE)["attention"]
    expected = Trial(case, "fp32", "bf16", "cuda").run(plain)
    noise = relative_errors(Trial(case, "bf16", "bf16", "cuda").run(plain), expected)
    trial = Trial(case, "bf16", "bf16", "cuda")
    if packed:
        trial.pack()
    error = relative_errors(trial.run(kernel), expected)
    del expected
    held = all(error[n] <= TOLERANCE[n] for n in NAMES)
    spaces = {phase: workspace(trial, phase, case.kernel) for phase in PHASES}
    return {"case": str(case), "held": held, "error": error, "error_of_reference_in_bf16": noise, "workspace": spaces}


def calls() -> dict[str, Any]:
    """The section `calls`: single calls."""
    cases = [case for case in LARGE if not case.kernel.startswith("fa4") or installed_packages(FA4)]
    rows = [attempt(one_call, case) | {"case": str(case)} for case in cases]
    rows += [attempt(one_call, case, True) | {"case": f"{case}, views of one register"} for case in cases
             if case.layout.cp == 1]  # fmt: skip
    exact = [w["measured_less_declared"] for r in rows for w in r.get("workspace", {}).values()]
    return {"tolerance": TOLERANCE, "all_held": all(r.get("held", False) for r in rows),
            "failed": [r["case"] for r in rows if not r.get("held", False)],
            "workspace_measured_less_declared": sorted(set(exact)), "rows": rows}  # fmt: skip


# ---- speed -----------------------------------------------------------------------------------------------------------


def milliseconds(f: Callable[[], None], times: int = 20) -> float:
    """Median time of a call, by CUDA events."""
    for _ in range(3):
        f()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in marks:
        begin.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks)


def timed(case: Case, times: int = 20) -> dict[str, Any]:
    """Times of a case. TFLOP/s count half of all scores, as for one document, also where documents are packed."""
    trial, kernel = Trial(case, "bf16", "bf16", "cuda"), kernels_by_call(case.plan, DEVICE)["attention"]
    flops = 4 * case.tokens**2 * case.heads[0] * case.size * case.batch / 2
    out: dict[str, Any] = {"case": str(case)}
    for phase, f in PHASES.items():
        took = milliseconds(lambda f=f: f(trial, kernel), times)
        work = flops * (1 if phase == "forward" else 2.5)
        out[phase] = {"ms": took, "tflops_causal": work / took / 1e9}
    out["workspace"] = {phase: workspace(trial, phase, case.kernel) for phase in PHASES}
    return out


def speed() -> dict[str, Any]:
    """The section `speed`: kernels and the reference; then the varlen kernel, launched for other maximum numbers of
    documents."""
    whole = replace(SPEED, documents=False)
    cases = [whole, SPEED, replace(whole, batch=2), replace(whole, kernel="cudnn"),
             replace(whole, kernel="cudnn", batch=2), replace(whole, heads=(32, 8), size=64)]  # fmt: skip
    if installed_packages(FA4):
        cases += [replace(whole, kernel="fa4"), replace(whole, kernel="fa4", batch=2), replace(SPEED, kernel="fa4_documents"),
                  replace(whole, kernel="fa4", size=64)]  # fmt: skip
    rows = [attempt(timed, case) for case in cases]
    rows.append(attempt(timed, replace(whole, kernel="reference"), 5))
    usual, most = flash_kernels.most_documents, dict[str, Any]()
    for count in (1, 16, 128, 512):
        flash_kernels.most_documents = lambda tokens, count=count: count
        try:
            row = attempt(timed, whole)
            most[str(count)] = {phase: row[phase] for phase in PHASES} if "forward" in row else row
        finally:
            flash_kernels.most_documents = usual
    return {"rows": rows, "by_most_documents": most}


# ---- whole steps -----------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """Steps of a model on four batches of text, which are used in turn. Initial weights do not depend on the kernels."""

    p: Program
    packed: bool
    run: Executor = field(init=False)
    batches: list[list[dict[str, torch.Tensor]]] = field(default_factory=list[list[dict[str, torch.Tensor]]])
    counts: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    calls: int = 0

    def __post_init__(self) -> None:
        p = self.p
        check_kernels(p, DEVICE, packed=self.packed)
        state = allocate(p, DEVICE)
        fill(state, ((q, self._drawn(i)) for i, q in enumerate(p.params)))
        memory = Arena(plan_arena(p), p.precision, DEVICE)
        optimizer = AdamW(Optimizer(learning_rate=3e-4), DEVICE)
        self.run = Counting(p, state, Nccl(0), kernels(p, DEVICE), memory, optimizer)
        train, _ = open_samples(
            Data(pack_documents=self.packed), open_tokenizer("bytes"), p.sequence_length, p.layout.global_batch_size
        )
        for step in range(4):
            drawn = [[train.sample(i) for i in ids] for ids in samples_of(p, step * p.layout.global_batch_size)]
            for batch in drawn:
                check_documents(p, batch)
            self.batches.append([micro_batch(p, batch, DEVICE) for batch in drawn])
            self.counts.append(torch.tensor(target_counts(p, drawn), device=DEVICE))
        fixed = constants(p, DEVICE)
        self.run.micro_batches = [fixed | {n: t.clone() for n, t in b.items()} for b in self.batches[0]]

    def _drawn(self, number: int) -> torch.Tensor:
        q = self.p.params[number]
        if q.scale is None:
            return torch.full(q.shape, q.fill, device=DEVICE)
        return torch.randn(q.shape, generator=torch.Generator(DEVICE).manual_seed(number), device=DEVICE) * q.scale

    def go(self, first: int, last: int, step: Callable[[], None]) -> tuple[list[float], list[float]]:
        """Losses and milliseconds of steps first..last, by the clock of the host around each step."""
        losses, times = list[float](), list[float]()
        for number in range(first, last + 1):
            assert self.run.optimizer is not None
            for mine, new in zip(self.run.micro_batches, self.batches[number % 4], strict=True):
                for name, t in new.items():
                    mine[name].copy_(t)
            self.run.counts.copy_(self.counts[number % 4])
            self.run.optimizer.step.fill_(number)
            self.run.optimizer.rate.fill_(rate(LearningRateSchedule(warmup_steps=10), 3e-4, number, 1000))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
            losses.append(self.run.totals[1].item())
        return losses, times


class Counting(Executor):
    """A run that counts kernel calls."""

    kernel_calls = 0

    def call(self, buffer: Any, call: Any) -> None:
        Counting.kernel_calls += call.phase not in ("start", "finish")
        super().call(buffer, call)


def steps(m: ModelSpec, layout: Layout, length: int, *, packed: bool, capture: bool = False) -> dict[str, Any]:
    """Fourteen steps: losses, times of the last ten, and peak memory against the price. With `capture`, ten more as a CUDA
    graph. The last of the fourteen has the batch of the second, so its loss must be lower."""
    p = compile_step(m, layout, length, precision="bf16")
    priced = price(p)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held_before = torch.cuda.memory_allocated()
    s = Steps(p, packed)
    Counting.kernel_calls = 0
    first, _ = s.go(1, 1, lambda: walk(p, s.run))
    called = Counting.kernel_calls
    rest, times = s.go(2, 14, lambda: walk(p, s.run))
    peak, losses, took = torch.cuda.max_memory_allocated() - held_before, first + rest, times[3:]
    data = sum(
        t.numel() * t.element_size() for b in s.batches for x in b for t in x.values()
    )  # the price has one batch
    out: dict[str, Any] = {
        "attention": layout.attention, "packed": packed, "sequence_length": length, "losses": losses,
        "finite": all(x == x and abs(x) < 1e9 for x in losses), "falls": losses[13] < losses[1],
        "median_ms": median(took), "step_ms": took, "tokens_per_s": layout.global_batch_size * length / median(took) * 1e3,
        "peak_allocated_gib": gib(peak), "priced_gib": gib(priced.allocated),
        "beside_the_price_gib": gib(data), "workspace_gib": gib(priced.workspace),
        "matmul_tflops_of_step": priced.total_flops / median(took) / 1e9, "body_calls": called,
        "ms_per_call": median(took) / called,
    }  # fmt: skip
    out["peak_over_price"] = peak / (priced.allocated + data)
    if capture:
        out["captured"] = attempt(captured, s)
    return out


def captured(s: Steps) -> dict[str, Any]:
    """Ten steps as a CUDA graph."""
    graph = CapturedStep(s.run)
    graph.capture()
    losses, times = s.go(15, 24, graph.replay)
    return {"losses": losses, "median_ms": median(times[2:])}


def compared(m: ModelSpec, length: int, *, capture: bool) -> dict[str, Any]:
    """The section of a model: flash and the reference with packed documents, cuDNN and flash with whole sequences."""
    out: dict[str, Any] = {"model": m.name, "layers": m.layers}
    for name, kernel, packed in (("flash", "flash", True), ("reference", "reference", True),
                                 ("cudnn, whole sequences", "cudnn", False), ("flash, whole sequences", "flash", False)):  # fmt: skip
        layout = Layout(attention=kernel)  # type: ignore[arg-type]
        out[name] = attempt(lambda layout=layout, packed=packed: steps(
            m, layout, length, packed=packed, capture=capture and layout.attention != "reference"))  # fmt: skip
    for a, b in (("flash", "reference"), ("flash, whole sequences", "cudnn, whole sequences")):
        if "losses" in out[a] and "losses" in out[b]:
            apart = [abs(x - y) for x, y in zip(out[a]["losses"], out[b]["losses"], strict=True)]
            out[f"{a} against {b}"] = {"first_loss_apart": apart[0], "losses_apart_at_most": max(apart),
                                       "held": apart[0] < 0.01 and max(apart) < 0.1}  # fmt: skip
    return out


# ---- the record ------------------------------------------------------------------------------------------------------


def attempt(f: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The result of a section, or its traceback. Memory is freed in both cases."""
    begun = time.perf_counter()
    try:
        out = f(*arguments)
    except Exception:  # the next section still runs
        out = {"failed": traceback.format_exc(limit=-8)}
        print(out["failed"], flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return out | {"seconds": round(time.perf_counter() - begun, 2)}


def commit_of(given: str) -> str:
    """The given hash, or that of the git repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return given or found


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "calls": calls,
    "speed": speed,
    "small": lambda: compared(SMALL, 128, capture=True),
    "llama-3.2-1b": lambda: compared(preset("llama-3.2-1b", where="--only").model, 8192, capture=True),
    "llama-3.1-8b": lambda: compared(replace(preset("llama-3.1-8b", where="--only").model, layers=4), 8192, capture=False),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="for the record")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    args.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "case": "fused attention against the reference kernel, one GPU", "commit": commit_of(args.commit),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    for name in args.only.split(","):
        record[name] = attempt(SECTIONS[name])
        (args.out / "flash_attention.json").write_text(json.dumps(record, indent=1) + "\n")
        brief = {k: v for k, v in record[name].items() if k != "rows"}
        print(name, json.dumps(brief)[:3000], flush=True)


if __name__ == "__main__":
    main()

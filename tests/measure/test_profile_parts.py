"""Moments of a step by part, from what torch's profiler exports of a GPU; and what a run without memory is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penteract.cli import main
from penteract.cli import profile as cli_profile
from penteract.cli.resolve.card_cluster import Card
from penteract.config.hardware import cluster
from penteract.config.layout import FUSIONS
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.engine.executor.profiled import ProfiledExecutor
from penteract.engine.rank.failures import from_exception, is_of_a_peer
from penteract.errors import OutOfMemory
from penteract.measure.profile.analyse.advice import slower_parts
from penteract.measure.profile.analyse.attribution import attribute, split_evenly
from penteract.measure.profile.out_of_memory import out_of_memory_line
from penteract.measure.profile.prediction import ask_of_run, part_of
from penteract.measure.profile.show.difference import as_difference
from penteract.measure.profile.show.profile_text import as_text, price_of
from penteract.measure.profile.trace_events import RecordedStep, Span, recorded_steps
from penteract.measure.schemas.profile_parts import changes
from penteract.measure.schemas.profile_reader import read_profile
from penteract.planner.ask import as_settings
from penteract.planner.plan import estimator, plan_one
from penteract.planner.report.smaller_layouts import smaller
from penteract.schedule.actions import Transfer
from penteract.step.names import of_transfers

PROFILES = Path(__file__).parent / "profiles"
PARTS = {"forward linear (a.py:1)": "compute", "start all_gather (a.py:2)": "tensor"}


def test_a_gpus_trace_is_read_by_launches_and_its_moments_add_up():
    """A collective half under a product; a kernel of the next step, launched in it, is not counted."""
    (step,) = recorded_steps(json.loads((PROFILES / "gpu_trace.json").read_text()), [2])
    assert (step.begin, step.nanoseconds) == (1_000_060_000, 100_000)
    assert [(s.kind, s.name, s.begin) for s in step.spans if s.kind != "call"] == [
        ("compute", "forward linear (a.py:1)", 10_000), ("collective", "start all_gather (a.py:2)", 30_000),
        ("compute", "", 90_000),
    ]  # fmt: skip
    found = attribute(step, lambda name: PARTS.get(name, "unmatched"), on_device=True)
    assert found == {"compute": 40_000, "tensor": 20_000, "unmatched": 10_000, "launch": 30_000}
    assert sum(found.values()) == step.nanoseconds


def test_collectives_of_a_steps_end_go_on_beside_the_next():
    """Steps of 100 us: a product of 90, an update of 10, and from there a gather of 60, which hides under both."""
    rows: list[dict[str, Any]] = []
    for n, begin in enumerate((0, 100, 200)):
        rows.append(_annotated(f"step {n}", begin / 10, 9))  # the host runs ahead
        for i, (name, stream, at, took) in enumerate((
            ("forward linear (a.py:1)", 7, begin, 90), ("update", 7, begin + 90, 10),
            ("all_gather parameters", 19, begin + 90, 60),
        )):  # fmt: skip
            asked = begin / 10 + 2 * i + 1
            rows.append(_annotated(name, asked - 0.5, 1))
            about = {"correlation": 10 * n + i, "stream": stream}
            rows.append({"cat": "cuda_runtime", "name": "launch", "ts": asked, "dur": 0.1, "tid": 1, "args": about})
            kernel = "ncclDevKernel_AllGather" if stream == 19 else "kernel"
            rows.append({"cat": "kernel", "name": kernel, "ts": at, "dur": took, "tid": stream, "args": about})
    parts = {"forward linear (a.py:1)": "compute", "update": "update", "all_gather parameters": "data"}
    steps = recorded_steps({"traceEvents": rows}, [1, 2])
    assert [step.nanoseconds for step in steps] == [100_000, 100_000]
    for step in steps:
        gathers = [(s.begin, s.nanoseconds) for s in step.spans if s.kind == "collective"]
        assert gathers == [(90_000, 60_000)]
        assert attribute(step, parts.__getitem__, on_device=True) == {"compute": 90_000, "update": 10_000}


def test_a_copy_from_another_gpu_is_of_a_collective():
    """Ranks that read each other's registers have copies in place of NCCL's kernels; the host's copies are others."""
    rows: list[dict[str, Any]] = [_annotated(f"step {n}", begin, 90) for n, begin in enumerate((0, 100))]
    kernels = {"Memcpy PtoP (Device -> Device)": "collective", "Memcpy DtoH (Device -> Pinned)": "copy",
               "Memcpy HtoD (Pinned -> Device)": "copy", "Memcpy DtoD (Device -> Device)": "compute"}  # fmt: skip
    for i, kernel in enumerate(kernels):
        about = {"correlation": i, "stream": 7 + i}
        rows.append({"cat": "cuda_runtime", "name": "copy", "ts": 101 + i, "dur": 0.1, "tid": 1, "args": about})
        rows.append({"cat": "gpu_memcpy", "name": kernel, "ts": 110 + 10 * i, "dur": 8, "tid": 7 + i, "args": about})
    (step,) = recorded_steps({"traceEvents": rows}, [1])
    assert {s.kernel: s.kind for s in step.spans if s.kernel} == kernels


def test_what_ran_before_a_step_is_no_part_of_it():
    early, within = Span("compute", "early", "", -50, 40), Span("compute", "within", "", 20, 30)
    late = Span("compute", "late", "", 100, 10)
    found = attribute(RecordedStep(0, 100, [early, within, late]), lambda name: name, on_device=True)
    assert found == {"within": 30, "launch": 70}


def _annotated(name: str, at: float, took: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": name, "ts": at, "dur": took, "tid": 1}


def test_a_mean_of_steps_keeps_every_picosecond():
    totals = {"a": 100, "b": 100, "c": 101}
    assert sum(split_evenly(totals, 3).values()) == round(301_000 / 3)


def test_two_profiles_are_compared_by_ops():
    one = read_profile(PROFILES / "tiny_tp2_pp2.json")
    other = json.loads(json.dumps(one))
    slower = max(range(len(other["ops"])), key=lambda i: other["ops"][i]["predicted"])
    other["ops"][slower]["measured"] += 10**12
    assert changes(one, other)[0]["name"] == other["ops"][slower]["name"]
    assert "+1.00 s" in as_difference(one, other)
    assert "it may be noise" in as_difference(one, one)
    text = as_text(one)
    assert text.count("\n") > 60
    assert "Note: processes of a CPU share its cores" in text and "Here each tensor has memory of its own" in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_each_way_to_be_out_of_memory_is_one(error: Exception):
    assert isinstance(from_exception(error), OutOfMemory)
    assert not is_of_a_peer(error)


def test_a_run_without_memory_is_told_owners_and_what_fits():
    settings = ["precision.dtype=bf16", "batch.sequence_length=256", "batch.micro_batch_size=4", "parallel.tp=2"]
    run = resolve(None, "tiny", settings).run
    line = out_of_memory_line("error[MEMORY]: no memory left · fix: x", run, 22 * 2**20)
    assert "error[MEMORY]: no memory left · found planned for the fullest rank: " in line
    assert "of a step" in line
    assert line.count("\n") == 0
    limit = "error[MEMORY]: no memory left · allowed 22.00 MiB · fix: x"
    assert out_of_memory_line(limit, run) == line
    options = re.search(r"fix: ((?:--\S+ \S+ )+)\(", line)
    assert options is not None
    resolve(None, "tiny", [*settings, *options[1].split()])


def test_the_optimizer_on_the_host_is_among_what_fits():
    run = resolve(None, "llama-3.2-1b", ["parallel.dp=8", "batch.sequence_length=1024"]).run
    settings = {setting: (value,) for setting, value in as_settings(run.layout).items()}
    plan = plan_one(ask_of_run(run, cluster("8xH100")), settings, estimator)
    need = plan.best.estimate.allocated
    found = {one.keys: one.allocated for one in smaller(plan, need)}
    assert found["--memory.offload_optimizer true"] < need
    assert found["--parallel.zero 1"] < need
    assert all(size <= need for size in found.values())


def test_exact_rows_of_experts_are_among_what_fits():
    words = ["parallel.ep=2", "parallel.dp=2", "parallel.zero=1", "model.layers=8", "kernels.experts=grouped",
             "parallel.expert_rows=padded"]  # fmt: skip
    run = resolve(None, "qwen3-30b-a3b", words).run
    settings = {setting: (value,) for setting, value in as_settings(run.layout).items()}
    plan = plan_one(ask_of_run(run, cluster("2xH200")), settings, estimator)
    need = plan.best.estimate.allocated
    assert {one.keys: one.allocated for one in smaller(plan, need)}["--parallel.expert_rows exact"] < need
    exact = plan_one(plan.ask, {**settings, "expert_rows": ("exact",)}, estimator)
    assert "--parallel.expert_rows exact" not in {one.keys for one in smaller(exact, need)}


@pytest.mark.parametrize("word", ["parallel.tp=2", "--gpus=8xH100", "--out=new"])
def test_two_profiles_are_compared_as_they_are(word: str, capsys: pytest.CaptureFixture[str]):
    file = str(PROFILES / "tiny_tp2_pp2.json")
    assert main(["profile", file, file]) == 0
    assert "it may be noise" in capsys.readouterr().out
    assert main(["profile", file, file, word]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error[USAGE]: two profiles take no values of a run") and told.err.count("\n") == 1


def test_advice_names_where_time_is_and_nothing_of_the_measuring_itself():
    profile = read_profile(PROFILES / "tiny_tp2_pp2.json")
    at = next(i for i, row in enumerate(profile["waterfall"]) if row["name"] == "predicted")
    plain: Any = {"label": "Host gaps", "about": "Nothing ran.", "level": False, "picoseconds": 10**12, "share": 0.5}
    rows: Any = [*profile["waterfall"][: at + 1], *({**plain, "name": name} for name in ("launch", "profiler"))]
    (one,) = slower_parts(rows, [], 0.01)
    assert (one["what"], price_of(one)) == ("host gaps in the predicted time", "nothing ran")
    op: Any = {"part": "launch", "name": "update", "measured": 2 * 10**12, "predicted": 10**12}
    (one,) = slower_parts(rows, [op], 0.01)
    assert price_of(one) == "most in: update +1.00 s"


def test_a_layout_of_a_gpu_is_told_what_fits_too():
    """Its settings name fused ops by words, as `plan --json` does; where no single change is enough, two are named."""
    run = resolve(None, "llama-3.2-1b", ["batch.sequence_length=4096", "batch.micro_batch_size=16"]).run
    fast = replace(run.layout, attention="cudnn", elementwise="triton", loss="chunked", fuse=FUSIONS)
    one = out_of_memory_line("error[MEMORY]: no memory left", replace(run, layout=fast), 60 * 2**30, "1xH100")
    assert "fix: --batch.micro_batch_size 8 (" in one
    two = out_of_memory_line("error[MEMORY]: no memory left", replace(run, layout=fast), 20 * 2**30, "1xH100")
    assert re.search(r"fix: --\S+ \S+ --\S+ \S+ \(\d", two)


def test_a_run_that_nobody_trained_has_what_train_would_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    card = Card(name="NVIDIA H100", free=79 * 2**30, capability=(9, 0), packages=frozenset({"triton"}))
    monkeypatch.setattr(cli_profile, "card_here", lambda device, launched: card)
    resolved, *_ = cli_profile._resolved(None, "llama-3.2-1b", None, None, ["batch.sequence_length=4096"], json=True)
    assert (resolved.run.layout.elementwise, resolved.run.precision.dtype) == ("triton", "bf16")
    assert resolved.run.layout.attention == "flash"
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(to_toml(resolve(None, "tiny")))
    trained, *_ = cli_profile._resolved(str(run), None, None, None, [], json=True)
    assert trained.run.layout.elementwise == "reference"


def test_the_profiler_keeps_the_names_of_messages_that_are_posted_at_once(tmp_path: Path) -> None:
    """It writes "unknown" for a name that is not ASCII, and their kernels then belong to no part."""
    posted = ((Transfer("Send", "value", 0, 0, 1), (0, 0), 1), (Transfer("Recv", "gradient", 0, 0, 1), (0, 0), 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        ProfiledExecutor(SimpleNamespace(post_p2p=lambda some: None)).post_p2p(posted)  # type: ignore[arg-type]
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (name,) = [row["name"] for row in rows if row.get("cat") == "user_annotation"]
    assert name == of_transfers(t for t, _, _ in posted) == "send value, recv gradient"
    assert part_of(name, {}) == "pipeline"

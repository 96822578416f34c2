"""Steps that `benchmarks/beside_ours.py` profiles after those it times: of two ranks on CPUs, and of some that fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forks
from penteract.config.hardware import cluster
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.data import Sample
from penteract.engine.rank.rank import Rank, join
from penteract.engine.session.trainer import Trainer
from penteract.measure.profile.prediction import predict
from penteract.measure.profile.recording import Recording
from penteract.measure.profile.trace_events import RecordedStep, Span, recorded_steps

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
PROFILES = Path(__file__).parent / "profiles"
SMALL = ["model.layers=2", "batch.sequence_length=32", "batch.micro_batch_size=1", "batch.global_batch_size=2",
         "training.validation_every=0", "precision.device=cpu"]  # fmt: skip
TIMED = {"median_ms": 12.5, "losses": [3.0, 2.0]}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


class Numbers:
    """The same tokens without end."""

    def __init__(self, length: int) -> None:
        tokens, zero = np.arange(length + 1, dtype=np.int64), np.zeros(length, dtype=np.int64)
        self.one = Sample(tokens[:-1], tokens[1:], zero, np.arange(length, dtype=np.int64))

    def __len__(self) -> int:
        return sys.maxsize

    def sample(self, index: int) -> Sample:
        return self.one


def _rank(out: Path, word: str, fails: int | None) -> int:
    """A rank of two that has timed two steps."""
    sys.path.insert(0, BENCHMARKS)
    ours, waits = import_module("beside_ours"), import_module("beside_waits")
    torch.set_grad_enabled(False)
    spec = resolve(None, "tiny", [*SMALL, word], world=2).run
    rank, samples = join(os.environ, "cpu"), Numbers(spec.sequence_length)
    trainer = Trainer.build(spec, rank)
    for n in (1, 2):
        trainer.step(n, samples, 2 * (n - 1))

    def profile() -> dict[str, Any]:
        if rank.number == fails:
            raise ValueError("no trace")
        return waits.profile_steps(trainer, samples, cluster("2xH200"), done=2, step_ms=12.5, most=2)

    ours.write_with_profile(TIMED, out, rank, profile, 100.0)
    rank.barrier()
    rank.leave()
    return 0


def _two_ranks(folder: Path, word: str, fails: int | None = None) -> tuple[list[int | None], dict[str, Any]]:
    out, port = folder / "record.json", forks.free_port()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    said = [folder / f"rank{r}" for r in range(2)]
    ranks = [
        forks.start(_rank, out, word, fails, environment={**os.environ, **place, "RANK": str(r), "LOCAL_RANK": str(r)},
                    out=said[r], err=said[r].with_suffix(".err"))
        for r in range(2)
    ]  # fmt: skip
    try:
        if fails is not None:  # what a launcher does
            ranks[fails].join(120)
            ranks[1 - fails].kill()
        for rank in ranks:
            rank.join(120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    codes = [rank.exitcode for rank in ranks]
    assert out.exists(), "".join(file.with_suffix(".err").read_text() for file in said)
    return codes, json.loads(out.read_text())


@pytest.mark.parametrize(("word", "axis"), [("parallel.tp=2", "tensor"), ("parallel.pp=2", "pipeline")])
def test_two_ranks_say_where_they_wait(tmp_path: Path, word: str, axis: str) -> None:
    codes, record = _two_ranks(tmp_path, word)
    assert codes == [0, 0]
    found = record.pop("profile")
    assert record == TIMED
    assert found["steps"] == 2
    assert {"measured_ms", "planned_ms", "planned_slower_ms", "idle_ms"} == {*found["exposed"][axis]}
    assert found["exposed"][axis]["measured_ms"] > 0
    assert found["exposed"][axis]["planned_ms"] > 0
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        exposed = sum(rank["exposed_ms"].values())
        assert rank["work_ms"] + rank["idle_ms"] + exposed <= rank["step_ms"] + 0.01
    chosen = found["ranks"][found["rank"]]
    assert chosen["step_ms"] == found["step_ms"]
    assert found["idle"] == pytest.approx(found["idle_ms"] / found["step_ms"], abs=1e-3)


def test_a_rank_that_fails_leaves_the_row_with_why(tmp_path: Path) -> None:
    codes, record = _two_ranks(tmp_path, "parallel.dp=2", fails=1)
    assert codes[1] == 1
    assert record == {**TIMED, "not_profiled": "rank 1: ValueError: no trace"}


def test_ranks_that_hang_are_ended_with_the_row(tmp_path: Path) -> None:
    out, said = tmp_path / "record.json", tmp_path / "said"
    process = forks.start(_hangs, out, environment=os.environ, out=said, err=said)
    process.join(60)
    assert process.exitcode == 1
    assert json.loads(out.read_text()) == {**TIMED, "not_profiled": "the process ended in profiled steps"}


def _hangs(out: Path) -> int:
    sys.path.insert(0, BENCHMARKS)
    from threading import Event

    def profile() -> dict[str, Any]:
        Event().wait()
        return {}

    ours = import_module("beside_ours")
    ours.write_with_profile(TIMED, out, Rank(0, 1, torch.device("cpu"), None), profile, 0.2)
    return 0


def test_steps_are_few_and_one_at_least() -> None:
    steps = import_module("beside_waits").steps_to_profile
    assert steps(130, 3) == (3, 1)
    assert steps(1434, 3) == (2, 1)
    assert steps(5700, 3) == (1, 0)
    assert steps(9500, 3) == (1, 0)


def test_a_collective_that_compute_hides_is_not_exposed() -> None:
    waits = import_module("beside_waits")
    steps = recorded_steps(json.loads((PROFILES / "gpu_trace.json").read_text()), [2])
    parts = {"forward linear (a.py:1)": "compute", "start all_gather (a.py:2)": "tensor"}
    recording = Recording(0, 0, True, {}, [], steps)
    found = waits.measured_waits(recording, lambda name: parts.get(name, "unmatched"))
    assert found == {"tensor": 20_000_000}


def test_idle_time_behind_a_wait_is_of_what_it_waits_for() -> None:
    """Of three gaps the first is behind a wait, half of the second too, as the host asks late, and the third is not."""
    names = ("forward linear (a.py:1)", "finish all_gather (a.py:2)", "forward linear (a.py:3)")
    calls = [Span("call", name, "", begin, 1) for begin, name in zip((0, 2, 4), names, strict=True)]
    calls += [Span("call", names[1], "", 55, 1), Span("call", names[0], "", 65, 1), Span("call", names[2], "", 92, 1)]
    kernels = [Span("compute", names[0], "k", begin, 20, 7, asked)
               for begin, asked in ((10, 0), (40, 4), (70, 65), (93, 66))]  # fmt: skip
    steps = [RecordedStep(0, 113, sorted([*calls, *kernels], key=lambda span: span.begin))]
    found = import_module("beside_waits").idle_waits(
        Recording(0, 0, True, {}, [], steps), lambda name: "tensor" if "all_gather" in name else "compute"
    )
    assert found == {"tensor": 1000 * (10 + 5)}


def test_a_copy_that_waits_for_another_rank_is_its_axis() -> None:
    """Ranks meet before they read each other's memory, by no kernel."""
    copy = Span("collective", "start all_gather", "Memcpy PtoP", 30, 10, 9, -3)
    spans = [Span("compute", "a", "k", 0, 10, 7, -5), copy, Span("compute", "b", "k", 40, 10, 7, -1)]
    recording = Recording(0, 0, True, {}, [], [RecordedStep(0, 50, spans)])
    part: Callable[[str], str] = lambda name: "tensor" if "all_gather" in name else "compute"  # noqa: E731
    waits = import_module("beside_waits")
    assert waits.idle_waits(recording, part) == {"tensor": 20_000}
    assert waits.measured_waits(recording, part) == {"tensor": 10_000}


@pytest.mark.parametrize(
    "layout", [["dp=2", "zero=1"], ["tp=2"], ["pp=2", "dp=2"], ["tp=2", "dp=2", "zero=2"], ["cp=2"]]
)
def test_planned_waits_and_what_they_slow_are_the_plans_parts(layout: list[str]) -> None:
    """Waits, events of the parts' own, and what is slower beside them: these are the parts of the plan."""
    waits = import_module("beside_waits")
    spec = resolve(
        None, "tiny", [*SMALL[:3], *(f"parallel.{word}" for word in layout), "batch.global_batch_size=4"]
    ).run
    plan = predict(spec, cluster("8xH200"))
    planned, slower = waits.planned_waits(plan)
    assert {*planned} <= {"tensor", "context", "expert", "pipeline", "data", "update"}
    assert all(took >= 0 for took in slower.values())
    for part in ("tensor", "context", "pipeline"):  # they compute nothing
        assert planned.get(part, 0) + slower[part] == plan.totals.get(part, 0)
    assert sum(planned.values()) + sum(slower.values()) <= plan.step

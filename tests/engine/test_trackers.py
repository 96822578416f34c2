"""Metrics beside metrics.jsonl: trackers that work, fail and hang, the energy of a GPU, and what a row always has."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import RunPrediction, RunSpec
from penteract.engine.rank.rank import Rank
from penteract.engine.session.outputs.energy import EnergyMeter
from penteract.engine.session.outputs.metrics import read_metrics
from penteract.engine.session.outputs.trackers import BackgroundTracker, Trackers, open_trackers
from penteract.engine.session.session import Session, SessionOptions

SMALL = [
    "--batch.sequence_length=32",
    "--batch.global_batch_size=2",
    "--training.sample_tokens=0",
    "--training.steps=3",
]


def spec(folder: Path, *words: str) -> RunSpec:
    return resolve(None, "tiny", [f"--output.folder={folder}", *SMALL, *words], world=1).run


class Broken:
    """Fails, or hangs, from some step on."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.shown = act, list[int]()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > 1:
            self.act()
        self.shown.append(step)

    def close(self) -> None: ...


def told(tracker: Broken, seconds: float) -> float:
    """Three rows, and the end. -> seconds that it took"""
    began = time.monotonic()
    trackers = Trackers((BackgroundTracker("theirs", lambda: tracker),))
    for step in (1, 2, 3):
        trackers.log({"step": step, "train/loss": 1.0})
    trackers.close(seconds)
    return time.monotonic() - began


def test_a_tracker_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ConnectionError("no\nroute")

    tracker = Broken(fails)
    told(tracker, 20.0)
    assert tracker.shown == [1]
    assert caplog.messages == [
        "theirs shows no more metrics, metrics.jsonl goes on: ConnectionError: no route"
    ]  # fmt: skip


def test_a_tracker_that_hangs_keeps_no_run(caplog: pytest.LogCaptureFixture) -> None:
    end = threading.Event()
    assert told(Broken(lambda: end.wait(60) and None), 0.2) < 30
    end.set()
    assert caplog.messages == ["theirs shows no more metrics, metrics.jsonl goes on: it had not ended after 0 s"]


def test_one_that_cannot_be_opened_is_said_once(caplog: pytest.LogCaptureFixture, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def init(**_: Any) -> None:
        raise SystemExit("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    trackers = open_trackers(spec(tmp_path, '--output.trackers=["wandb"]'), tmp_path, 1)
    trackers.close()
    assert caplog.messages == ["wandb shows no more metrics, metrics.jsonl goes on: SystemExit: not logged in"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_the_run_and_its_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, Any]]()
    api = ModuleType(name)
    api.init = lambda **how: calls.append(("init", how))  # type: ignore[attr-defined]
    api.log = lambda values, step: calls.append(("log", (step, values)))  # type: ignore[attr-defined]
    api.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, api)
    trackers = open_trackers(spec(tmp_path, f'--output.trackers=["{name}"]'), tmp_path / "a_run", 1)
    trackers.log({"step": 7, "train/loss": 2.0, "train/skipped": True, "perf/mfu": None, "val/loss": float("nan")})
    trackers.close()
    (first, how), *rest = calls
    assert first == "init" and (how["project"], how["name"], how["resume"]) == ("tiny", "a_run", "allow")
    assert how.get("id") == ("a_run" if name == "wandb" else None)
    assert how["config"]["train"]["steps"] == 3
    assert rest == [("log", (7, {"train/loss": 2.0, "train/skipped": 1.0})), ("finish", None)]


class Nvml:
    """A GPU whose counter goes on by 500 J a reading, and fails in the end."""

    def __init__(self) -> None:
        self.uuid, self.readings = "", 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle"
        self.readings += 1
        if self.readings > 3:
            raise OSError("GPU is lost")
        return 10**9 + 500_000 * self.readings


def test_energy_is_the_difference_of_the_counter() -> None:
    nvml = Nvml()
    meter = EnergyMeter.by_uuid(nvml, "12ab")
    assert nvml.uuid == "GPU-12ab"
    assert [meter.used() for _ in range(4)] == [500.0, 500.0, None, None]
    assert nvml.readings == 4  # it is not asked again
    assert EnergyMeter.of(torch.device("cpu")).used() is None


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps on a CPU that seems to have a counter and a peak. -> the run's folder"""
    module = "penteract.engine.session.outputs.step_outputs.EnergyMeter.of"
    monkeypatch.setattr(module, lambda _: EnergyMeter.by_uuid(Nvml(), "0"))
    words = ['--output.trackers=["tensorboard"]'] if find_spec("tensorboard") else []
    predicted = RunPrediction(allocated_bytes=2**30, step_s=0.25, model_flops=10**9, peak_flops=1e12)
    rank = Rank(0, 1, torch.device("cpu"), None)
    session = Session(spec(tmp_path, *words), rank, SessionOptions(tmp_path / "run", predicted=predicted))
    with torch.no_grad():
        session.open()
        session.go()
    return tmp_path / "run"


def test_a_row_has_speed_mfu_predictions_and_energy(trained: Path) -> None:
    rows = read_metrics(trained / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        seconds = row["perf/step_time_s"]
        assert isinstance(seconds, float)
        assert row["perf/predicted_step_time_s"] == 0.25 and row["mem/predicted_gib"] == 1.0
        assert row["perf/mfu"] == pytest.approx(1e9 / seconds / 1e12)
        assert row["perf/model_tflops_per_rank"] == pytest.approx(1e-3 / seconds)
        assert row["perf/tokens_per_sec"] == pytest.approx(64 / seconds)
        assert row["train/loss"] and row["train/grad_norm"]
    assert [row.get("energy/gpu_j") for row in rows] == [500.0, 500.0, None]
    assert rows[-1]["mem/measured_gib"]


def test_tensorboard_shows_what_the_file_has(trained: Path) -> None:
    """The real package reads the events back."""
    if not find_spec("tensorboard"):
        pytest.skip("tensorboard is not installed")
    loader = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(trained / "tensorboard")).Reload()
    rows = read_metrics(trained / "metrics.jsonl")
    for name in ("train/loss", "perf/mfu", "mem/predicted_gib"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == {row["step"]: pytest.approx(row[name], rel=1e-6) for row in rows}

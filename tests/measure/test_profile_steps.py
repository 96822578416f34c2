"""No wire is under way when torch's profiler stops: a thread of gloo that still notes its copies would end the
process."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.kernels.registry import TargetElsewhere
from penteract.measure.profile.record import steps
from penteract.measure.profile.record.steps import TrainedSteps, profiled
from penteract.measure.rehearse.rank_rehearsal import rehearse_rank


class Seen:
    """In the place of torch's profiler."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def __enter__(self) -> Seen:
        self.happened.append("begin")
        return self

    def __exit__(self, *error: object) -> None:
        self.happened.append("end")


@pytest.mark.parametrize("behind", [False, True])
def test_parameters_are_settled_while_the_profiler_looks(monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    happened = list[str]()

    def start(number: int, *_: object) -> Any:
        happened.append(f"step {number}")
        return lambda: happened.append(f"outcome {number}") or SimpleNamespace(loss=0.0)

    device = SimpleNamespace(behind=behind, settle=lambda: happened.append("device"))
    run = SimpleNamespace(device=device, settle_parameters=lambda: happened.append("parameters"))
    trainer: Any = SimpleNamespace(
        run=run, start=start, rank=SimpleNamespace(device=SimpleNamespace(type="cpu")),
        spec=SimpleNamespace(layout=SimpleNamespace(global_batch_size=1)), observed=None, repeated=None,
    )  # fmt: skip
    monkeypatch.setattr(steps, "profile", lambda **_: Seen(happened))
    monkeypatch.setattr(steps, "collected_between_steps", nullcontext)
    monkeypatch.setattr(steps, "exported", lambda seen: {"traceEvents": []})
    monkeypatch.setattr(steps, "recorded_steps", lambda *_: [])
    profiled(TrainedSteps(trainer, []), count=1)  # type: ignore[arg-type]
    last = ["outcome 3", "parameters", "device", "end"]
    assert happened[-4:] == last
    assert happened.index("begin") < happened.index("step 2")


@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2 zero=1", "dp=2 zero=3", "pp=2", "pp=2 vpp=2 schedule=interleaved", "cp=2", "tp=2", "dp=2 ep=2"],
)
def test_and_nothing_else_is_left_on_a_wire(layout: str) -> None:
    """As the rehearsal of a rank has it, which is held to true runs: what starts in two steps is waited for in them, or
    is a gathering of parameters, which it settles."""
    words = [f"--parallel.{word}" for word in layout.split()]
    preset = "tiny-moe" if "ep" in layout else "tiny"
    small = ["--batch.sequence_length=32", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
             "--training.validation_every=0"]  # fmt: skip
    spec = resolve(None, preset, [*small, *words], world=2).run
    for rank in range(2):
        made = rehearse_rank(spec, rank, TargetElsewhere("cpu", "cpu", (0, 0)))
        assert not made.faults
        started = {event.number for event in made.events if not event.wait}
        assert started == {event.number for event in made.events if event.wait}

"""Seconds of steps, by the device's own clock."""

from __future__ import annotations

import time

import pytest
import torch

from penteract.measure.bench.ranks.case_provenance import HotFacts
from penteract.measure.bench.ranks.step_ends import StepEnds


class Event:
    """A CUDA event of a device that needs 50 ms a step, whatever the host does meanwhile."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = 50.0 * Event.made
        Event.made += 1

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_gpus_steps_are_those_of_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ends = StepEnds(torch.device("cuda", 0))
    for wait in (0.0, 0.02, 0.0):  # a host that is late now and then
        time.sleep(wait)
        ends.mark()
    assert ends.seconds() == [0.05, 0.05]


def test_a_hosts_steps_are_those_of_the_host() -> None:
    ends = StepEnds(torch.device("cpu"))
    ends.mark()
    time.sleep(0.01)
    ends.mark()
    (one,) = ends.seconds()
    assert one >= 0.01


def test_nobody_asks_what_a_cpu_is_doing() -> None:
    facts = HotFacts(torch.device("cpu"), 0)
    assert facts.found() == {}
    facts.ask()
    assert facts.found() == {}

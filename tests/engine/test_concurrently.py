"""Packages of kernels are imported while a rank joins the others and draws weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from threading import Barrier, Event
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.kernels import registry
from penteract.engine.rank.rank import Rank
from penteract.engine.session import early_imports
from penteract.engine.session.concurrently import SWITCH_S, concurrently
from penteract.engine.session.trainer import Place, Trainer
from penteract.engine.state.state import TrainingState
from penteract.step.program import Program

LIMIT = 60.0  # seconds until a meeting fails


def test_work_and_body_go_on_at_once() -> None:
    meeting = Barrier(2)
    with concurrently(lambda: meeting.wait(LIMIT)):
        meeting.wait(LIMIT)


def test_the_interpreter_changes_hands_sooner_meanwhile() -> None:
    before = sys.getswitchinterval()
    with concurrently(lambda: None):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == before


def test_an_error_of_the_work_is_raised_after_the_body() -> None:
    done, before = Event(), sys.getswitchinterval()

    def broken() -> NoReturn:
        raise ImportError("no such package")

    with pytest.raises(ImportError, match="no such package"), concurrently(broken):
        done.set()
    assert done.is_set() and sys.getswitchinterval() == before


def test_an_error_of_the_body_is_raised_first_when_both_have_ended() -> None:
    failing, ended = Event(), Event()

    def broken() -> NoReturn:
        assert failing.wait(LIMIT)
        ended.set()
        raise ImportError("no such package")

    with pytest.raises(ValueError, match="weights"), concurrently(broken):
        failing.set()
        raise ValueError("weights")
    assert ended.is_set()


def test_a_run_imports_packages_while_it_draws_weights() -> None:
    rank = Rank(0, 1, torch.device("cpu"), None)
    meeting, place = Barrier(2), Place.here(rank)
    imported = list[Program]()

    def packages(p: Program) -> None:
        imported.append(p)
        meeting.wait(LIMIT)

    def draw(p: Program, state: TrainingState, seed: int) -> None:
        meeting.wait(LIMIT)
        place.initialise(p, state, seed)

    spec = resolve(None, "tiny", [], world=1).run
    trainer = Trainer.on(spec, rank, replace(place, initialise=draw, import_packages=packages))
    assert imported == [trainer.program]


def test_a_rank_on_a_gpu_begins_before_it_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is left to the trainer, which imports the same."""
    spec, imported = resolve(None, "tiny", ["--parallel.pp=2"]).run, list[tuple[int, torch.device]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert early_imports.begin_imports(spec, {}) is None
    at = torch.device("cuda", 1)

    def picked(wanted: str, local: int) -> torch.device:
        assert (wanted, local) == ("auto", 1)
        return at

    def broken(p: Program, device: torch.device) -> NoReturn:
        imported.append((p.rank, device))
        raise ImportError("no such package")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(early_imports, "pick_device", picked)
    monkeypatch.setattr(early_imports, "check_kernels", lambda *_, **__: None)
    monkeypatch.setattr(early_imports, "import_packages", broken)
    thread = early_imports.begin_imports(spec, {"RANK": "1", "LOCAL_RANK": "1"})
    assert thread is not None and thread.daemon
    thread.join(LIMIT)
    assert imported == [(1, at)]


def test_the_first_error_of_a_package_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was imported halfway fails again for another reason."""
    errors = iter([ImportError("libcuda is not there"), RuntimeError("the operator is registered already")])

    def load() -> NoReturn:
        raise next(errors)

    monkeypatch.setitem(sys.modules, "packaged", SimpleNamespace(PACKAGES={"ALL": load}))  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_failed", {})
    for _ in range(2):
        with pytest.raises(ImportError, match="libcuda"):
            registry.load_package("packaged:ALL")

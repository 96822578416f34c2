"""Packages of kernels are imported while weights are drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from threading import Barrier, Event
from typing import NoReturn

import pytest
import torch

from penteract.config.resolve.resolved_run import resolve
from penteract.engine.rank.rank import Rank
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

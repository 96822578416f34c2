"""A few of the draws of `make test-faults`, and that they can fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import faults_long
from faults.corruptions import STEPS, Damage
from faults.kills import Kills, Whole, Wrong
from penteract.engine.checkpoint import reading

SEED = 11  # not that of the long draws


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damage]:
    grad, level = torch.is_grad_enabled(), logging.getLogger("penteract").level
    torch.set_grad_enabled(False)
    logging.getLogger("penteract").setLevel(logging.ERROR)
    yield Damage(tmp_path_factory.mktemp("damaged"))
    torch.set_grad_enabled(grad)
    logging.getLogger("penteract").setLevel(level)


def test_no_drawn_damage_is_silent(damage: Damage) -> None:
    outcomes = [damage.draw(number, SEED) for number in range(60)]
    assert [one for one in outcomes if one.wrong] == []
    assert {one.result for one in outcomes} >= {f"step {step}" for step in STEPS[1:]}
    assert len({kind for one in outcomes for kind in one.kinds}) > 10
    assert damage.draw(3, SEED) == outcomes[3]  # by the seed alone


def test_a_loader_that_compares_no_digests_is_found(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "checked", lambda path, handle, part, dtype: handle.get_tensor(part.key))
    assert any("the damage is silent" in damage.draw(number, SEED).wrong for number in range(60))


def test_a_resume_that_goes_back_too_far_is_found(damage: Damage) -> None:
    with damage.copy() as run:
        result = damage.resumed(run)
    assert result == f"step {STEPS[-1]}"
    assert damage.problem(result, set()) == ""
    assert damage.problem(f"step {STEPS[0]}", set()).startswith("went back to step 2, though step 6 is whole")
    assert damage.problem(f"step {STEPS[1]}", {STEPS[2]}).startswith("the state is not that of step 4")
    assert damage.problem("CHECKPOINT", {2, 4}).startswith("refused with CHECKPOINT, though step 6 is whole")
    assert damage.problem("CHECKPOINT", {2, 4, 6}) == ""


def test_a_killed_run_ends_as_if_nothing_had_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that ends otherwise is found."""
    kills, compared = Kills(tmp_path), list[str]()
    compare = Kills._compare

    def twice(self: Kills, folder: Path, whole: Whole) -> None:
        compare(self, folder, whole)
        for other in (
            replace(whole, losses=[*whole.losses[:-1], (30, 0.0, 0.0)]),
            replace(whole, digests={**whole.digests, next(iter(whole.digests)): []}),
        ):
            with pytest.raises(Wrong) as failed:
                compare(self, folder, other)
            compared.append(str(failed.value))

    monkeypatch.setattr(Kills, "_compare", twice)
    outcome = kills.draw(1, SEED)
    assert outcome.wrong == "" and outcome.kills
    assert compared[0].startswith("its losses differ from those of an undisturbed run")
    assert compared[1].startswith("its last checkpoint differs")


def test_a_part_of_the_draws_is_a_part_of_both_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_long, "PROGRESS", tmp_path / "build" / "faults.jsonl")
    monkeypatch.setattr(faults_long, "one", lambda kills, damage, kind, number: _line(kind, number))
    order = faults_long.turns()
    assert sorted(order) == sorted([("kill", n) for n in range(200)] + [("corruption", n) for n in range(1500)])
    assert {kind for kind, _ in order[:102]} == {"kill", "corruption"}
    monkeypatch.setattr(faults_long.time, "monotonic", iter(range(10_000)).__next__)
    first = faults_long.run("a", 20)
    assert 0 < len(first) < 20
    again = faults_long.run("a", 20)
    assert len(first) < len(again) and first.items() <= again.items()
    assert len(faults_long.run("b", 20)) < 20  # other sources: from the beginning
    found = faults_long.record(again, "a")
    assert (found["complete"], found["corruptions"]["drawn"], found["kills"]["drawn"]) == (False, len(again), 0)
    assert found["failures"] == [again["corruption", 3]] and found["corruptions"]["silent"] == 1


def _line(kind: str, number: int) -> dict[str, object]:
    wrong = "the damage is silent" * (number == 3)
    return {"kind": kind, "number": number, "kinds": ["flip"], "result": "step 2", "wrong": wrong, "seconds": 1.0}

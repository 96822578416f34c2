"""What is said to change nothing changes nothing: the planned step is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penteract.config.hardware import cluster
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import Resolved, resolve
from penteract.config.rules.without_effect import notes_without_effect, why_without_effect
from penteract.readings.estimator import Estimator

MOE = ("tiny-moe", ["parallel.dp=2", "parallel.ep=2"])
DENSE = ("tiny", ["parallel.dp=2"])


def resolved(preset: str, words: list[str]) -> Resolved:
    return resolve(None, preset, ["batch.sequence_length=64", *words], world=2)


@pytest.mark.parametrize(("about", "setting", "value"), [
    (DENSE, "cp_method", "ring"), (DENSE, "ep_method", "all_gather"), (DENSE, "capacity_percent", 300),
    (MOE, "capacity_percent", 300), (DENSE, "recompute_every", 2), (DENSE, "recompute_first", 2),
    (DENSE, "offload_every", 3), (DENSE, "loss_chunk", 64),
])  # fmt: skip
def test_the_planned_step_is_the_same(about: tuple[str, list[str]], setting: str, value: Any) -> None:
    run = resolved(*about).run
    layout = replace(run.layout, loss="reference") if setting == "loss_chunk" else run.layout
    assert why_without_effect(setting, run.model, layout)
    changed = replace(layout, **{setting: value})
    assert changed != layout
    one = Estimator.of_run(run, cluster("2xH200"))
    first, second = (one.estimate(lay) for lay in (layout, changed))
    assert first == replace(second, layout=layout) and one.time(first) == one.time(second)


@pytest.mark.parametrize(("about", "words"), [
    (DENSE, ["parallel.cp_method=ring", "memory.offload_every=2"]), (MOE, ["parallel.capacity_percent=300"]),
])  # fmt: skip
def test_what_was_given_is_named(about: tuple[str, list[str]], words: list[str]) -> None:
    run = resolved(about[0], [*about[1], *words]).run
    keys = [word.partition("=")[0] for word in words]
    found = notes_without_effect([*keys, "parallel.dp", "training.steps"], run.model, run.layout)
    assert [line.split()[:4] for line in found] == [["note:", key, "changes", "nothing:"] for key in keys]
    assert not notes_without_effect(["parallel.dp"], run.model, run.layout)
    assert not notes_without_effect(keys, run.model, Layout(dp=2))

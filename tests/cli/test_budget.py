"""A recomputation for a budget is chosen anew whenever a run starts: one that goes on may have another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penteract.config.layout import Layout
from penteract.config.recompute import NONE, MemoryBudget
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.planner.settle_budget import settle_budget

Tell = Callable[..., Any]
Calls = list[dict[str, Any]]
BUDGET = ("memory.recompute=budget", "memory.budget_gib=0.05")


def a_run(folder: Path, *words: str) -> Path:
    """One that was trained so: its file is what `train` hands to the engine, as that writes it."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "latest").touch()
    (folder / "run.toml").write_text(to_toml(settle_budget(resolve(overrides=words))[0]), encoding="utf-8")
    return folder


def recomputed(layout: Layout) -> tuple[object, ...]:
    return layout.recompute, layout.recompute_every, layout.recompute_first, layout.recompute_else


def test_it_is_chosen_anew_for_the_layout_that_goes_on(tell: Tell, started: Calls, tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "a", *BUDGET, "parallel.tp=4")
    assert recomputed(resolve(run / "run.toml").run.layout)[0] == NONE  # it fits as it is
    told = tell("train", "--resume", run, "--parallel.tp", "1")
    assert (told.code, told.out.count("Recomputation recomputes ")) == (0, 1)
    assert tell("train", *BUDGET).code == 0
    again, fresh = (call["resolved"].run.layout for call in started)
    assert recomputed(again) == recomputed(fresh) and again.recompute != NONE
    assert started[0]["resolved"].budget == MemoryBudget(allocated=int(0.05 * 2**30))
    less = tell("train", "--resume", run, "--parallel.tp", "1", "--memory.budget_gib", "0.03")
    assert less.code == 2 and "no recomputation keeps so little · memory.budget_gib" in less.err


@pytest.mark.parametrize("layout", ["parallel.tp=4", "parallel.tp=1", "parallel.pp=2"])
def test_a_run_file_holds_the_budget_and_the_choice(layout: str, tmp_path: Path) -> None:
    """The ranks, which know no prices, read the choice."""
    path = a_run(tmp_path / "a", *BUDGET, layout) / "run.toml"
    settled = settle_budget(resolve(overrides=[*BUDGET, layout]))[0]
    read = resolve(path)
    assert read.run == settled.run and read.budget == settled.budget
    assert to_toml(settle_budget(read)[0]).count("derived: budget 0.05 GiB") == 4


@pytest.mark.parametrize(
    ("words", "recompute", "budget"),
    [
        (["--memory.recompute", "none"], NONE, None),
        (["--memory.recompute", "full"], ("*",), None),
        (["--memory.recompute", "swiglu"], ("swiglu",), None),
        (["--memory.budget", "1"], NONE, MemoryBudget(1.0)),
        (["--memory.budget_gib", "1"], NONE, MemoryBudget(allocated=2**30)),
    ],
)
def test_the_command_line_has_the_last_word(
    words: list[str],
    recompute: tuple[str, ...],
    budget: MemoryBudget | None,
    tell: Tell,
    started: Calls,
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "runs" / "a", *BUDGET)
    assert resolve(run / "run.toml").run.layout.recompute_first  # two sets of words were chosen
    told = tell("train", "--resume", run, *words)
    assert told.code == 0, told.err
    resolved = started[0]["resolved"]
    assert recomputed(resolved.run.layout) == (recompute, 1, 0, NONE)
    assert resolved.budget == budget


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--memory.budget", "0.5"], 'error[BUDGET]: a budget without memory.recompute "budget"'),
        (
            ["--memory.recompute", "full", "--memory.budget", "0.5"],
            'error[BUDGET]: a budget without memory.recompute "budget"',
        ),
        (["--memory.recompute", "budget"], "error[BUDGET]: a budget without a bound"),
        ([*BUDGET, "--memory.budget", "0.5"], "error[BUDGET]: a budget is given twice"),
        (
            ["--memory.chosen", "swiglu"],
            "error[BUDGET]: ops chosen by a budget, but there is no budget"
            " · memory.chosen (--memory.chosen) · found swiglu"
            ' / allowed only with memory.recompute "budget" · fix: --memory.recompute swiglu',
        ),
    ],
)
def test_words_that_do_not_go_together(tell: Tell, words: list[str], line: str) -> None:
    told = tell("train", *words)
    assert told.code == 2 and told.err.startswith(line) and told.err.count("\n") == 1

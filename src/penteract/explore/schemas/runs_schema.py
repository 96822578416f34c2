"""The messages of the page about runs: their curves, their memory, their checkpoints, and why one failed."""

from __future__ import annotations

from typing import Literal, TypedDict

from penteract.explore.schemas.page_values import Fact, Tick


class RunError(TypedDict):
    """A row of `errors.jsonl`. `text`: as its rank printed it."""

    text: str
    rank: str
    time: str


class RunCheckpoint(TypedDict):
    """A committed checkpoint. `proven`: it was read back, and a finite step was trained after it."""

    step: str
    saved: str
    size: str
    proven: bool


class RunSummary(TypedDict):
    """A run folder.

    state        created, running, done, stopped, failed, or "unknown"; `good`: whether nothing is wrong with it
    step         the last in its metrics
    chosen       whether its curves are drawn; `colour`: the number of its line, from 0
    predicted, measured  memory of rank 0, at its peak; `difference`: measured less predicted
    predicted_step, measured_step  the time of a step, and the median of its last steps; `step_difference` likewise
    note         what could not be read, or is elsewhere
    """

    name: str
    state: str
    good: bool
    since: str
    step: str
    command: str
    chosen: bool
    colour: int
    predicted: str
    measured: str
    difference: str
    predicted_step: str
    measured_step: str
    step_difference: str
    errors: list[RunError]
    checkpoints: list[RunCheckpoint]
    note: str


class RunLine(TypedDict):
    """One run of a curve. `points`: x, y, x, y … as shares of the drawing, y upwards; `texts`: of each point."""

    run: str
    colour: int
    points: list[float]
    texts: list[str]


class RunLevel(TypedDict):
    """What was predicted of a run. `at`: as a share of the drawing, upwards."""

    run: str
    colour: int
    at: float
    text: str


class RunCurve(TypedDict):
    """A field of `metrics.jsonl` over the steps; of many steps, each point is the last of its part.

    levels  of each run what was predicted of the field, if it was
    """

    name: str
    label: str
    unit: str
    lines: list[RunLine]
    levels: list[RunLevel]
    across: list[Tick]
    up: list[Tick]


class RunsAnswer(TypedDict):
    """The runs of the folder that the server was given. `command`: what fills the view, where it is empty."""

    version: int
    kind: Literal["runs"]
    served: bool
    folder: str
    command: str
    number: str
    verdict: str
    good: bool
    facts: list[Fact]
    runs: list[RunSummary]
    curves: list[RunCurve]

"""What the page and the planner say to each other: JSON objects of one version, as `docs/explore.md` lists them.

A number that people read comes with its text: the page shows the text and draws by the number. Bytes are integers,
times are seconds; of lanes, whole picoseconds. `plan` is the object that `penteract plan --json` prints for the
same question.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from penteract.explore.schemas.bench_schema import BenchAnswer, BenchOptions
from penteract.explore.schemas.page_values import Amount, ChartAxis, DeviceMemory, Fact, Question, Tick, Value
from penteract.explore.schemas.profile_schema import OpenedFile, ProfileAnswer, ProfileAsked
from penteract.explore.schemas.ranks_schema import RanksAnswer
from penteract.explore.schemas.runs_schema import RunsAnswer
from penteract.explore.schemas.schedule_schema import ScheduleAnswer, ScheduleChoice
from penteract.explore.schemas.search_schema import (
    CompareAnswer,
    FrontStep,
    SearchAnswer,
    SearchEnd,
    SearchOptions,
    SearchProgress,
    WhatIfAnswer,
)

VERSION = 1
MOST_BYTES, MOST_FILE_BYTES = 2**20, 2**25  # of a request; of one with files that the reader opened in the page

Kind = Literal["opening", "memory", "step", "fits", "schedule", "schedules", "search", "what_if", "compare", "ranks",
               "runs", "bench", "profile", "run_file"]  # fmt: skip


class PageRequest(TypedDict, total=False):
    """One question of the page.

    pp_rank    the pipeline rank to look into; null: the fullest
    search     of the Layouts view: which layouts are searched, and what else is asked of them
    rank       of the Ranks view: the rank that is looked at; null: the first
    parameter  of the Ranks view: the parameter whose parts are shown; empty: the first of a layer
    runs       of the Runs view: the names of the runs whose curves are drawn; none: the newest
    profile    of the Profile view: which profile it shows, and which one beside it
    files      of the Profile view: profiles that the reader opened in the page
    bench      of the Bench view: which sweep or file, and what is shown of it
    """

    version: int
    kind: Kind
    question: Question
    pp_rank: int | None
    search: SearchOptions
    rank: int | None
    parameter: str
    runs: list[str]
    profile: ProfileAsked
    files: list[OpenedFile]
    bench: BenchOptions


class ControlChoice(TypedDict):
    """A value of a control. `why_not`: the rule that it breaks with the other settings; empty: none."""

    value: Value
    text: str
    why_not: str


class ControlSetting(TypedDict):
    """The present value of a control, and the values to choose from.

    chosen  whether the question sets it; else it is the planner's default
    idle    why it changes nothing here; empty: it may
    """

    value: Value
    text: str
    chosen: bool
    idle: str
    choices: list[ControlChoice]


class Control(TypedDict):
    """A control of the page. `name`: the path of its value in a question, such as `layout.tp`.

    input      degree: a slider and a number; count: a number; choice: a list; switch; model: a list or a file
    dimension  dp, tp, pp, cp or ep: the colour of its dimension; empty: none
    """

    name: str
    label: str
    about: str
    input: Literal["degree", "count", "choice", "switch", "model"]
    dimension: str
    least: float
    most: float


class ControlGroup(TypedDict):
    """Controls under one heading. `open`: whether the page shows them from the start."""

    title: str
    open: bool
    controls: list[Control]


class CatalogueModel(TypedDict):
    """A published model, with its size and where its shape was published."""

    name: str
    text: str
    source: str


class Opening(TypedDict):
    """The first answer: what the page consists of, and the question that it opens with.

    terms  word -> its explanation, for words that figures use
    """

    version: int
    kind: Literal["opening"]
    program: str
    question: Question
    models: list[CatalogueModel]
    controls: list[ControlGroup]
    terms: dict[str, str]


class BrokenRule(TypedDict):
    """A rule that the layout breaks. `control`: the control at fault, or empty."""

    control: str
    text: str
    allowed: str


class Repair(TypedDict):
    """The nearest question without broken rules, and what it changes."""

    text: str
    question: Question


class MemoryBlock(TypedDict):
    """One row of the memory of a rank: `count · flight · each` bytes.

    formula, numbers  of `each`: with names, and with values; equal if there is no formula
    times             factors in front of the formula, such as "32 × 2 in flight × "; may be empty
    line              the line of code that allocates it, "model/mlp.py:17", or empty
    """

    what: str
    detail: str
    amount: Amount
    share: str
    formula: str
    numbers: str
    times: str
    line: str


class Owner(TypedDict):
    """One of the five kinds of memory, with its rows, the largest first."""

    name: str
    label: str
    about: str
    amount: Amount
    share: str
    blocks: list[MemoryBlock]


class SourceLines(TypedDict):
    """Lines of the program around one of them. `first`: the number of the first line; `line`: of the one meant."""

    first: int
    line: int
    lines: list[str]


class RankGroup(TypedDict):
    """Pipeline ranks with the same memory. `pp_ranks`: which; `owners`: amounts in the order of `Owner`s."""

    label: str
    gpus: str
    pp_ranks: list[int]
    amount: Amount
    owners: list[Amount]
    fits: bool
    shown: bool


class Figures(TypedDict):
    """What the page draws and prints of one layout.

    verdict  whether the fullest rank fits, in a sentence; `fits`: the same as a value
    legend   name in formulas -> "value, meaning"
    sources  "model/mlp.py:17" -> the lines around it
    """

    headline: str
    fits: bool
    verdict: str
    total: Amount
    facts: list[Fact]
    pp_rank: int
    rank_label: str
    owners: list[Owner]
    card: DeviceMemory
    axis: ChartAxis
    ranks: list[RankGroup]
    legend: dict[str, str]
    sources: dict[str, SourceLines]
    notes: list[str]


class MemoryAnswer(TypedDict):
    """The memory of a layout. `plan` and `figures` are null if it breaks rules."""

    version: int
    kind: Literal["memory"]
    question: Question
    command: str
    settings: dict[str, ControlSetting]
    broken: list[BrokenRule]
    repair: Repair | None
    plan: dict[str, Any] | None
    figures: Figures | None


class StepPoint(TypedDict):
    """A moment of the step: its place on the axis (0 to 1), live activations, workspace, and their texts.

    total  what is in use; `what`: the call that runs
    """

    at: float
    activations: int
    workspace: int
    total: Amount
    what: str


class HeldAmount(TypedDict):
    """What stays for the whole step, of one owner."""

    name: str
    label: str
    amount: Amount


class StepAnswer(TypedDict):
    """Memory of one rank over a simulated step.

    held       what stays for the whole step, by owner
    peak       the number of the point with the most bytes in use
    allocated  all that the rank allocates: with the free part of the arena, and the largest workspace
    note       which micro-batches are shown, if not all
    """

    version: int
    kind: Literal["step"]
    pp_rank: int
    rank_label: str
    held: list[HeldAmount]
    points: list[StepPoint]
    peak: int
    allocated: Amount
    card: DeviceMemory
    across: list[Tick]
    axis: ChartAxis
    seconds: str
    note: str


class FitAnswer(TypedDict):
    """One change of the layout, and what it does. One line of a stream; the last line is `FitsEnd`.

    group         what stays the same: "the same step on the same GPUs", …
    memory, time  the difference to the present layout, as text
    """

    version: int
    kind: Literal["fit"]
    group: str
    text: str
    fits: bool
    amount: Amount
    memory: str
    seconds: float
    time: str
    question: Question


class FitsEnd(TypedDict):
    """The end of the stream: how many changes were tried, and how many break rules or cannot be priced."""

    version: int
    kind: Literal["fits_end"]
    tried: int
    refused: int
    text: str


class RunFile(TypedDict):
    """The layout as a run file for `penteract train`."""

    version: int
    kind: Literal["run_file"]
    name: str
    text: str


class ErrorAnswer(TypedDict):
    """What cannot be answered, as the command line says it. `control`: the control at fault, or empty."""

    version: int
    kind: Literal["error"]
    text: str
    error: dict[str, Any]
    control: str


Answer = (
    Opening | MemoryAnswer | StepAnswer | FitAnswer | FitsEnd | ScheduleAnswer | ScheduleChoice | SearchProgress
    | SearchAnswer | FrontStep | SearchEnd | WhatIfAnswer | CompareAnswer | RanksAnswer | RunsAnswer
    | BenchAnswer | ProfileAnswer | RunFile | ErrorAnswer
)  # fmt: skip
MESSAGES: tuple[type, ...] = (
    PageRequest, Opening, MemoryAnswer, StepAnswer, FitAnswer, FitsEnd, ScheduleAnswer, ScheduleChoice, SearchProgress,
    SearchAnswer, FrontStep, SearchEnd, WhatIfAnswer, CompareAnswer, RanksAnswer,
    RunsAnswer, BenchAnswer, ProfileAnswer, RunFile, ErrorAnswer,
)  # fmt: skip

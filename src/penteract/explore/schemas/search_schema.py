"""The messages of the page about all layouts of a question: the search, other questions, and two layouts compared."""

from __future__ import annotations

from typing import Literal, TypedDict

from penteract.explore.schemas.page_values import Amount, ChartAxis, DeviceMemory, Fact, Question, Value, WaterfallStep


class SearchOptions(TypedDict):
    """What the Layouts view asks besides its question, whose layout is the chosen one.

    fix               setting -> the values that it may have, as `--fix`; a setting that is not here may have any
    tokens            of a whole training, as `--tokens`: "15T"; empty: no costs are asked for
    usd_per_gpu_hour  with `tokens`: the price of an hour; 0: not known
    against           the settings of a layout to compare the chosen one with; null: none
    """

    fix: dict[str, list[Value]]
    tokens: str
    usd_per_gpu_hour: float
    against: dict[str, Value] | None


class LayoutPoint(TypedDict):
    """A layout that was priced.

    name       as in `--layout`; `layout`: the same as settings of a question
    seconds    of the simulated step; of a layout that is not `simulated`, a lower bound
    rate       tokens a second and GPU: of one that is not `simulated`, an upper bound; `speed`: as text
    front      whether no simulated layout is as fast with less memory
    """

    name: str
    layout: dict[str, Value]
    amount: Amount
    seconds: float
    step: str
    rate: float
    speed: str
    simulated: bool
    fits: bool
    front: bool


class RankedLayout(TypedDict):
    """A row of `penteract plan`'s table. `hours`, `days`, `usd`: of the training of `tokens`; empty: not asked."""

    number: int
    point: LayoutPoint
    mfu: str
    bubble: str
    limited_by: str
    hours: str
    days: str
    usd: str


class FilterValue(TypedDict):
    """A value that a setting may be held at."""

    value: Value
    text: str


class SettingFilter(TypedDict):
    """A setting of layouts, and the values that the page offers to hold it at. `dimension`: as of a control."""

    setting: str
    label: str
    dimension: str
    values: list[FilterValue]


class LeftOut(TypedDict):
    """How many layouts are not in the table, for one reason."""

    count: int
    text: str
    why: str


class SearchProgress(TypedDict):
    """What a search has found so far: a line in a stream, every tenth of a second."""

    version: int
    kind: Literal["search_progress"]
    text: str
    best: LayoutPoint | None


class SearchAnswer(TypedDict):
    """The best layouts of a question: the rows of `penteract plan` for the `command`. `FrontStep`s, then a `SearchEnd`.

    number   tokens a second and GPU of the best, as text; `verdict`: what it is, in a sentence
    found    how many were looked at; `left_out`: why others are not in the table, the most frequent reason first
    points   those that were priced so far: the simulated ones, others that fit, and the nearest that do not
    memory, speed  the axes
    """

    version: int
    kind: Literal["search"]
    question: Question
    search: SearchOptions
    command: str
    headline: str
    number: str
    verdict: str
    fits: bool
    facts: list[Fact]
    found: str
    notes: list[str]
    top: list[RankedLayout]
    points: list[LayoutPoint]
    left_out: list[LeftOut]
    filters: list[SettingFilter]
    card: DeviceMemory
    memory: ChartAxis
    speed: ChartAxis


class FrontStep(TypedDict):
    """The fastest layout with at most nine tenths of the memory of the one before: one more point of the front."""

    version: int
    kind: Literal["front_step"]
    point: LayoutPoint
    text: str


class SearchEnd(TypedDict):
    """The end of a search: all points, those priced for the front too, with its final axes."""

    version: int
    kind: Literal["search_end"]
    points: list[LayoutPoint]
    memory: ChartAxis
    speed: ChartAxis
    text: str


class WhatIfAnswer(TypedDict):
    """The best layout of another question. One line of a stream.

    why_not  why there is none; then there are no numbers, and `question` is null
    speed    tokens a second and GPU; `change`: against the best of this question
    cost     of the training of `tokens`, or empty
    """

    version: int
    kind: Literal["what_if"]
    text: str
    why_not: str
    name: str
    amount: Amount
    seconds: float
    step: str
    speed: str
    change: str
    cost: str
    question: Question | None


class LayoutSide(TypedDict):
    """One of the compared layouts: its step from ideal to predicted, and its memory by owner."""

    name: str
    layout: dict[str, Value]
    amount: Amount
    verdict: str
    fits: bool
    seconds: float
    step: str
    speed: str
    mfu: str
    limited_by: str
    cost: str
    picoseconds: int
    waterfall: list[WaterfallStep]
    owners: list[Amount]


class Difference(TypedDict):
    """What two layouts differ in: a part of the step, or an owner of memory. `size`: other less chosen, as drawn."""

    what: Literal["time", "memory"]
    name: str
    label: str
    chosen: str
    other: str
    change: str
    size: float


class CompareAnswer(TypedDict):
    """The chosen layout, and the one that it is compared with, if there is one.

    most         of the waterfalls' axes, in picoseconds
    differences  of time, then of memory, the largest first
    why          in sentences: which settings differ, and what this does
    """

    version: int
    kind: Literal["compare"]
    question: Question
    command: str
    sides: list[LayoutSide]
    most: int
    differences: list[Difference]
    why: list[str]

"""The messages of the page about sweeps, of our own folders or of a file that the reader has: heat maps, points, the
table, the ranking beside the plan's, and residuals."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from penteract.explore.schemas.page_values import Fact, Tick


class SweepFile(TypedDict):
    """A CSV or JSON that the reader has chosen: its name, and what is in it. A link may have the name alone."""

    name: str
    text: NotRequired[str]


class BenchOptions(TypedDict, total=False):
    """What the Bench view shows, and how. Fields are named as the columns of a sweep's CSV; what is missing is chosen.

    sweep      the name of a sweep in the folder; `file`: a file instead of it
    rows, columns, panels  fields of the heat maps; "none": no such field. `colour`: the number that is shown
    across, up     numbers of the points
    predicted, measured  the numbers whose residuals are shown; `group`: the field that they are grouped by
    only       field -> the texts that its value may have, for all figures
    find       letters that a case has in one of its values, for all figures
    sort, descending  the field by which the table is sorted
    first      rows of the table; 0: all, as plain numbers, for a file
    """

    sweep: str
    file: SweepFile
    rows: str
    columns: str
    panels: str
    colour: str
    across: str
    up: str
    predicted: str
    measured: str
    group: str
    only: dict[str, list[str]]
    find: str
    sort: str
    descending: bool
    first: int


class SweepSummary(TypedDict):
    """A sweep of the folder."""

    name: str
    text: str
    chosen: bool


class BenchChoice(TypedDict):
    """A value of a field, and how many cases have it."""

    text: str
    count: str


class BenchField(TypedDict):
    """A column of the table of cases.

    source   setting, predicted, measured, or published: of a file of others
    number   whether its values are numbers; `unit`: theirs
    grid     whether heat maps may have it as rows or columns
    choices  its values, where they are few
    """

    name: str
    label: str
    unit: str
    source: Literal["setting", "predicted", "measured", "published"]
    number: bool
    grid: bool
    choices: list[BenchChoice]


class StateCount(TypedDict):
    """How many cases are in a state. `share`: of all, as drawn."""

    state: str
    count: str
    share: float
    about: str


class UnfinishedCase(TypedDict):
    """A case without a number that counts, and why."""

    name: str
    state: str
    why: str


class HeatMapCell(TypedDict):
    """A cell that has cases. `text`: the number of its best case, or what became of them; `about`: all about it.

    fill, ink  the colour of the cell, and that of its text; empty: no case counts
    count      of its cases; `bad`: of those that ended and do not count
    """

    panel: int
    row: int
    column: int
    text: str
    fill: str
    ink: Literal["light", "dark", ""]
    count: int
    bad: int
    name: str
    about: str


class HeatScale(TypedDict):
    """A step of the scale of colours, the lowest first."""

    fill: str
    text: str


class BenchHeatMap(TypedDict):
    """Heat maps. `rows`, `columns`, `panels`: labels of the fields; `row_texts` and so on: their values, in order.

    best   the number of the cell with the best case; `about`: which case of a cell is the best
    """

    colour: str
    source: str
    rows: str
    columns: str
    panels: str
    row_texts: list[str]
    column_texts: list[str]
    panel_texts: list[str]
    cells: list[HeatMapCell]
    scale: list[HeatScale]
    best: int
    about: str


class BenchAxis(TypedDict):
    """An axis of points. Marks are at shares of it."""

    label: str
    source: str
    ticks: list[Tick]


class BenchPoints(TypedDict):
    """Cases as points, in columns: places are shares of the axes, y upwards.

    good      whether a case counts
    front     the numbers of the cases of which no other is better in both
    first     how the front goes on from a case: along the axis across, or up
    """

    across: BenchAxis
    up: BenchAxis
    names: list[str]
    x: list[float]
    y: list[float]
    across_texts: list[str]
    up_texts: list[str]
    good: list[bool]
    front: list[int]
    first: Literal["across", "up", ""]
    text: str


class BenchTable(TypedDict):
    """Cases as a table. `fields`: names of its columns; `total`: rows that there are; `same`: what all
    cases have in common."""

    fields: list[str]
    rows: list[list[str]]
    total: int
    found: str
    same: str


class RankingRow(TypedDict):
    """A measured case. `rate`: its speed as a share of the best; `planned_rate`: likewise; negative: not predicted."""

    place: str
    planned: str
    name: str
    layout: str
    speed: str
    planned_speed: str
    rate: float
    planned_rate: float
    step: str
    planned_step: str
    time_error: str
    memory_error: str
    right: str


class BenchRanking(TypedDict):
    """The cases by speed, beside the plan's order. `about`: what this says of the plan, in sentences."""

    rows: list[RankingRow]
    found: str
    about: list[str]


class ResidualGroup(TypedDict):
    """Cases with one value of a field. `size`: the mean residual, as drawn: 1 is the longest bar."""

    text: str
    count: str
    mean: str
    size: float
    absolute: str
    worst: str
    worst_case: str


class BenchResiduals(TypedDict):
    """Measured less predicted, over measured. `points`: predicted across, measured up, with equal axes.

    pairs  the numbers that there are both of, as (predicted, measured, label)
    group  the field that cases are grouped by: the one that is asked for, else the one that explains most
    """

    label: str
    predicted: str
    measured: str
    pairs: list[list[str]]
    points: BenchPoints
    group: str
    group_label: str
    groups: list[ResidualGroup]
    about: list[str]


class BenchAnswer(TypedDict):
    """A sweep, or a file of cases. `command`: what fills the view, where it is empty; else what made the sweep.

    served   whether there is a folder of sweeps, which is read again and again; in an exported page it does not change
    empty    why nothing is shown
    what     of the headline: what its number is
    options  as they were taken, with what was chosen
    """

    version: int
    kind: Literal["bench"]
    served: bool
    command: str
    empty: str
    title: str
    what: str
    sweeps: list[SweepSummary]
    number: str
    verdict: str
    good: bool
    facts: list[Fact]
    headline: str
    notes: list[str]
    options: BenchOptions
    fields: list[BenchField]
    states: list[StateCount]
    unfinished: list[UnfinishedCase]
    heat: BenchHeatMap | None
    points: BenchPoints | None
    table: BenchTable | None
    ranking: BenchRanking | None
    residuals: BenchResiduals | None

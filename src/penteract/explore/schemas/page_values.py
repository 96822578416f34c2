"""Values that several messages of the page have: the question, and numbers with their texts."""

from __future__ import annotations

from typing import Any, TypedDict

Value = bool | int | float | str


class NamedModel(TypedDict):
    """A published model."""

    name: str


class ModelQuestion(NamedModel, total=False):
    """A published model by `name`, or the content of a config.json with the name of its file."""

    config: dict[str, Any]


class Question(TypedDict):
    """What the page asks about: one layout of one model. The degrees give the number of GPUs.

    global_batch_size  in sequences
    parts              keys of a run file's `[precision]`, besides the recipe
    layout             settings as in `--layout`; settings that are not here have the planner's defaults
    """

    model: ModelQuestion
    gpu: str
    sequence_length: int
    global_batch_size: int
    precision: str
    parts: dict[str, Value]
    optimizer: str
    headroom: float
    tp_across_nodes: bool
    layout: dict[str, Value]


class Amount(TypedDict):
    """Bytes, and how they are shown."""

    bytes: int
    text: str


class Tick(TypedDict):
    """A mark of an axis: `at` in bytes or as a share of the width."""

    at: float
    text: str


class ChartAxis(TypedDict):
    """An axis from 0 to `most` bytes, seconds, or tokens a second and GPU."""

    most: float
    ticks: list[Tick]


class DeviceMemory(TypedDict):
    """The device's memory, and what tensors may take of it. `drawn`: whether its line is on the axis."""

    name: str
    amount: Amount
    usable: Amount
    text: str
    drawn: bool


class Fact(TypedDict):
    """A number of the headline: what it is, its text, and where it comes from."""

    label: str
    text: str
    source: str


class WaterfallStep(TypedDict):
    """A part of the way from the ideal step to the predicted one, or on to the measured one. The picoseconds of the
    first row, and of all others that are no level, add up to the step's.

    name   "ideal", or the part of the step that takes longer than ideal
    level  whether the row is a sum, drawn from 0: "ideal", "predicted", "measured"
    share  of the step
    """

    name: str
    label: str
    about: str
    level: bool
    picoseconds: int
    text: str
    share: str

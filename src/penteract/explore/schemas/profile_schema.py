"""The messages of the page about profiles: a run's step as it was measured, beside its prediction."""

from __future__ import annotations

from typing import Literal, TypedDict

from penteract.explore.schemas.page_values import Amount, ChartAxis, Fact, Tick, WaterfallStep
from penteract.explore.schemas.schedule_schema import LaneBlock, LaneKind, LaneSpan, LaneTime


class OpenedFile(TypedDict):
    """A file that the reader opened in the page. `data`: its content, compressed (raw deflate), in base64."""

    name: str
    data: str


class ProfileAsked(TypedDict, total=False):
    """What the Profile view shows.

    name     of the profile; empty: the newest
    against  the name of another one, which is compared with it
    rank     whose lanes, kernels and memory are shown; null: the one with the most work
    """

    name: str
    against: str
    rank: int | None


class ProfileChoice(TypedDict):
    """A profile that can be shown.

    name    its path in the folder that was given, or the name of an opened file
    opened  whether the reader opened it in the page
    text    when it was written, or why it cannot be read
    side    "A" is shown, "B" is compared with it
    """

    name: str
    opened: bool
    text: str
    side: Literal["", "A", "B"]


class ProfileAdvice(TypedDict):
    """A change that gains time. `price`: what it takes in return, or where its time is."""

    what: str
    gain: str
    share: str
    price: str


class ProfiledTime(TypedDict):
    """A time, and how it is shown."""

    picoseconds: int
    text: str


class OpKernel(TypedDict):
    """A kernel of an op; on a CPU an operator of torch. `share`: of the op."""

    name: str
    calls: str
    took: ProfiledTime
    share: str


class ProfiledOp(TypedDict):
    """A part of the step under one name: all its calls on one pipeline rank.

    number   its place in the file; a link names it so
    kind     the place of its kind among those of the lanes
    part     to which part of the waterfall it belongs
    matched  "both"; "predicted": nothing was measured under this name; "measured": nothing was predicted
    change   measured less predicted
    share    of the measured step
    reached  what it achieved over its ceiling, and which one that is; empty: not known
    skew     the fastest and the slowest rank of the pipeline rank; empty: they are equal
    """

    number: int
    name: str
    stream: str
    kind: int
    part: str
    matched: Literal["both", "predicted", "measured"]
    note: str
    calls: str
    predicted: ProfiledTime
    measured: ProfiledTime
    change: str
    share: str
    reached: str
    skew: str
    kernels: list[OpKernel]


class ProfileBlock(LaneBlock):
    """An op's time, or a gap. `name`: short, to be drawn where there is room. `op`: its number; -1: it has none."""

    op: int


class ProfileLane(TypedDict):
    """The step of a pipeline rank as predicted, or of a rank as measured; fields as of a `RankLane`. `short`: its label
    where there is little room; `other_streams`: in the order of their starts."""

    pp_rank: int
    label: str
    short: str
    gpus: str
    begin: int
    end: int
    blocks: list[ProfileBlock]
    other_streams: list[LaneSpan]
    times: list[LaneTime]
    flight: list[int]
    most: int
    shown: bool


class ProfileLanes(TypedDict):
    """The predicted step above the measured one of a rank; drawn as the lanes of a `ScheduleAnswer`.

    missing  why there are none; then they are empty
    """

    kinds: list[LaneKind]
    lanes: list[ProfileLane]
    end: int
    marks: list[list[Tick]]
    most: int
    seconds: str
    missing: str


class SkewPart(TypedDict):
    """A part of a rank's step. `kind`: its place among the kinds of the lanes."""

    name: str
    label: str
    kind: int
    took: ProfiledTime


class ProfiledRank(TypedDict):
    """A rank's mean profiled step: `work` are its own kernels and gaps, `waits` exposed communication and bubble.

    parts  the same by part of the waterfall; they add up to `step`
    more   its work against the median of all ranks
    """

    rank: int
    pp_rank: int
    step: ProfiledTime
    work: ProfiledTime
    waits: ProfiledTime
    more: str
    parts: list[SkewPart]
    slowest: bool
    shown: bool


class OwnerMemory(TypedDict):
    """Bytes of one owner at the peak of a step. `process`: beside tensors, such as the device's context."""

    name: str
    label: str
    measured: Amount
    predicted: Amount
    change: str
    process: bool


class LiveOp(TypedDict):
    """Registers alive at the peak, by the op that made them."""

    name: str
    count: str
    amount: Amount
    share: str


class ProfiledMemory(TypedDict):
    """Memory of a rank, measured with a storage for each register; the plan has them in one block.

    planned  whether the profile has the plan's bytes by owner
    axis     from 0 to the most bytes of an owner
    """

    rank: int
    total: Amount
    predicted: Amount
    change: str
    at: str
    basis: str
    facts: list[Fact]
    owners: list[OwnerMemory]
    planned: bool
    live: list[LiveOp]
    axis: ChartAxis


class ProfileChange(TypedDict):
    """A part or an op of two profiles. `size`: B less A, in picoseconds; `share`: of A's step."""

    name: str
    label: str
    a: str
    b: str
    change: str
    size: int
    share: str


class ProfileComparison(TypedDict):
    """Two profiles: what made the difference. The largest changes come first.

    wrong  why the other one cannot be read; then there are no rows
    """

    a: str
    b: str
    verdict: str
    slower: bool
    about: list[str]
    parts: list[ProfileChange]
    ops: list[ProfileChange]
    left_out: str
    wrong: str


class ProfileFigures(TypedDict):
    """What the page draws and prints of one profile.

    number   the measured step; `verdict`: what it is beside the prediction, in a sentence
    most     of the waterfall's axis, in picoseconds
    kinds    of time, in the order of their places
    pp_rank  whose ops are shown, with the slowest rank of it
    ranks_about, unmatched  in sentences
    """

    name: str
    headline: str
    number: str
    verdict: str
    good: bool
    facts: list[Fact]
    notes: list[str]
    waterfall: list[WaterfallStep]
    most: int
    advice: list[ProfileAdvice]
    rank: int
    pp_rank: int
    ops: list[ProfiledOp]
    ops_about: str
    unmatched: str
    lanes: ProfileLanes
    ranks: list[ProfiledRank]
    ranks_about: str
    memory: ProfiledMemory


class ProfileAnswer(TypedDict):
    """The profiles that can be shown, and one of them.

    command  what fills the view where it is empty; else what prints the same
    why      why nothing is shown; empty: something is
    """

    version: int
    kind: Literal["profile"]
    served: bool
    folder: str
    command: str
    why: str
    profiles: list[ProfileChoice]
    figures: ProfileFigures | None
    comparison: ProfileComparison | None

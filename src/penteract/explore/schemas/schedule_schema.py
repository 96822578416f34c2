"""The messages of the page about a step in time: every pipeline rank as a lane, and the same with other schedules."""

from __future__ import annotations

from typing import Literal, TypedDict

from penteract.explore.schemas.page_values import Amount, Fact, Question, Tick


class LaneKind(TypedDict):
    """What a rank does, or why it does not compute. Lanes refer to kinds by their place in the list.

    other_stream  whether its events are on another stream than compute: messages, collectives and copies
    seconds       of all lanes shown; `share`: of all their time
    """

    name: str
    label: str
    about: str
    other_stream: bool
    seconds: str
    share: str


class LaneBlock(TypedDict):
    """A part of a rank's time on its compute stream: one pass of a micro-batch, or what is between passes.

    name        of a pass, such as "F3", or "F3.1" for the second chunk of the rank; else empty
    kind        the place of the kind with the most time in it
    start, end  in picoseconds from when the first rank begins the step
    intervals   kind, picoseconds, kind, picoseconds …: in their order, they add up to the block exactly. An interval
                that is much too short to be seen is joined to its neighbours; `text` has the sums of all
    """

    name: str
    kind: int
    start: int
    end: int
    intervals: list[int]
    text: str


class LaneSpan(TypedDict):
    """What runs on another stream than compute, in picoseconds; some that follow closely may be one span."""

    kind: int
    start: int
    end: int
    text: str


class LaneTime(TypedDict):
    """The time of one kind on one rank, and its share of the lane."""

    picoseconds: int
    text: str
    share: str


class RankLane(TypedDict):
    """The time of one pipeline rank, from `begin` to `end`. Its blocks follow each other without gaps.

    times        of each kind, in the order of the kinds
    flight       picoseconds, count, picoseconds, count …: micro-batches in flight from each moment on
    most         the most in flight; of a rank with several chunks, micro-batches are counted in each
    activations  all bytes that the rank allocates for them, and for the temporary results of a pass
    """

    pp_rank: int
    label: str
    gpus: str
    begin: int
    end: int
    blocks: list[LaneBlock]
    other_streams: list[LaneSpan]
    times: list[LaneTime]
    flight: list[int]
    most: int
    activations: Amount
    shown: bool


class ScheduleAnswer(TypedDict):
    """The step of every pipeline rank, as the simulated clock has it.

    bubble   its share of the whole step, as `penteract plan` prints it; `verdict`: what it means, in a sentence
    end      of the axis, in picoseconds
    marks    of the axis at zooms of 1, 2, 4 …, as shares of its whole width
    most     the most micro-batches in flight of any lane
    note     which micro-batches are shown, if not all
    missing  what would make more lanes, if there is one; `more`: a question that does
    """

    version: int
    kind: Literal["schedule"]
    question: Question
    schedule: str
    bubble: str
    verdict: str
    headline: str
    facts: list[Fact]
    kinds: list[LaneKind]
    lanes: list[RankLane]
    end: int
    marks: list[list[Tick]]
    most: int
    seconds: str
    note: str
    missing: str
    more: Question | None


class ScheduleChoice(TypedDict):
    """The same layout with another schedule. One line of a stream.

    why_not   the rule that it breaks; then there are no numbers, and `question` is null
    memory, time  the difference to the present layout, as text
    """

    version: int
    kind: Literal["schedule_choice"]
    name: str
    now: bool
    why_not: str
    fits: bool
    bubble: str
    amount: Amount
    memory: str
    seconds: float
    step: str
    time: str
    question: Question | None

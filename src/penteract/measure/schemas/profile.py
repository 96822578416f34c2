"""`profile.json`: what `penteract profile` leaves, as values. `docs/guide.md` tells how it is made.

Times are whole picoseconds, sizes bytes, rates FLOP/s and bytes/s, shares parts of 1 of the measured step. Texts that
people read are not in it, but for names and for what something is about: who shows it formats the numbers.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

VERSION = 1
FILE = "profile.json"


class ProfileFile(TypedDict):
    """A profile of a run's step: what was predicted, and what every rank measured.

    version     of this schema; a reader refuses others
    run         what was profiled
    made        where, when and by which versions: device, host, date, penteract, torch, threads, commit
    basis       what the prediction rests on
    step        how long a step takes
    waterfall   the verdict: from the ideal step to the predicted one to the measured one
    advice      what gains most, and what that costs; the largest first, empty where nothing was found
    ops         the parts of a step in its order, rank by rank of the pipeline, and on each stream by stream
    ranks       of each rank: its own work and its waits
    memory      of each rank: who holds how much at the peak of a step
    timeline    one step, planned and measured; profiles of before have none
    """

    version: Literal[1]
    kind: Literal["profile"]
    run: ProfiledRunFile
    made: dict[str, str]
    basis: Basis
    step: StepTimes
    waterfall: list[WaterfallRow]
    advice: list[Advice]
    ops: list[OpRow]
    unmatched: Unmatched
    ranks: list[RankRow]
    memory: list[MeasuredMemory]
    timeline: NotRequired[StepTimeline]


class ProfiledRunFile(TypedDict):
    """`file`: the run file. `layout`: its keys without `auto`; `text`: as in `plan --layout`."""

    file: str
    model: str
    parameters: int
    layout: dict[str, Any]
    text: str
    sequence_length: int
    precision: str
    tokens: int
    world: int


class Basis(TypedDict):
    """What predictions rest on.

    kind      "file": a hardware file that was named; "catalogue": curves of the catalogue's GPU; "short": the few
              workloads that every hardware file needs, measured for this profile on an idle device
    ceilings  what `reached` compares with
    """

    kind: Literal["file", "catalogue", "short"]
    about: str
    ceilings: Ceilings


class Ceilings(TypedDict):
    """The best that this device does, measured right after the step: `product` in FLOP/s, `copy` in bytes/s."""

    dtype: str
    product: float
    copy: float


class StepTimes(TypedDict):
    """Picoseconds of steps.

    bare      of each steady step without a profiler, on the rank that took longest; `measured`: their median
    profiled  of each step under the profiler, likewise
    slowdown  median of `profiled` over `measured`: what the profiler itself costs
    predicted the planned step; `ideal`: its products, with half of attention's, at the device's peak
    """

    bare: list[int]
    measured: int
    profiled: list[int]
    slowdown: float
    predicted: int
    ideal: int


class WaterfallRow(TypedDict):
    """A row of the waterfall. Rows in order: the level "ideal"; changes; the level "predicted"; changes; the level
    "measured". A level is the sum of the one before it and the changes between, to the picosecond.

    name   of a change: a part of the step (compute, attention, pointwise, launch, tensor, context, expert, data,
           pipeline, update, host), or "slowest_rank", "unmatched", "profiler"
    share  of the measured step
    """

    name: str
    label: str
    about: str
    level: bool
    picoseconds: int
    share: float


class Advice(TypedDict):
    """A change that gains time.

    gain   picoseconds of a step, predicted; `price`: what it takes in return, in words; of a part, where its time is
    kind   "layout": another value in the run file; "part": time beyond the prediction, whose cause is to be found
    """

    kind: Literal["layout", "part"]
    what: str
    gain: int
    price: str


class OpRow(TypedDict):
    """A part of the step under one name: all its calls in a step on one pipeline rank.

    pp_rank    its pipeline coordinate; `rank`: whose measurement this is (of the pipeline rank's ranks, the slowest)
    stream     as in the predicted timeline: "compute", "tp (2 ranks)", "activations to pp rank 1"
    part       to which part of the waterfall it belongs
    matched    "both"; "predicted": nothing was measured under this name; "measured": nothing was predicted
    calls      in a step; `predicted`, `measured`: picoseconds in a step, the latter a mean of the profiled steps
    flops, bytes  in a step: of its products; that it reads and writes. 0: not known
    ceiling    by which of the two it is held; "none": neither
    reached    what it achieved over that ceiling; 0: not known
    least, most  picoseconds on the fastest and on the slowest rank of the pipeline rank; `slowest`: that rank
    kernels    what ran in it
    """

    pp_rank: int
    rank: int
    stream: str
    name: str
    part: str
    matched: Literal["both", "predicted", "measured"]
    calls: int
    predicted: int
    measured: int
    share: float
    flops: int
    bytes: int
    ceiling: Literal["product", "copy", "none"]
    reached: float
    least: int
    most: int
    slowest: int
    kernels: list[KernelRow]


class KernelRow(TypedDict):
    """A kernel of an op: on a GPU as CUPTI calls it, on a CPU torch's operator."""

    name: str
    calls: int
    picoseconds: int


class Unmatched(TypedDict):
    """Picoseconds under names that only one side has, and their shares of the measured and of the predicted step."""

    measured: int
    measured_share: float
    predicted: int
    predicted_share: float


class RankRow(TypedDict):
    """A rank's profiled step. `work`: its own kernels and gaps between them; `waits`: exposed communication and bubble;
    `parts`: the same by part of the waterfall, which add up to `step`."""

    rank: int
    pp_rank: int
    step: int
    work: int
    waits: int
    parts: dict[str, int]


class MeasuredMemory(TypedDict):
    """Bytes of one rank, each register in a storage of its own, measured: none is copied from the plan.

    basis      "storages": all that torch's dispatcher handed out, counted; "allocator": the history of torch's GPU
               allocator
    peak       bytes of tensors at the peak of the step; `at`: the call that ran then
    owners     who holds them at that moment; they add up to `peak`
    reserved   bytes that the allocator took from the device; `device`: that the device has in use; 0: there is none
    process    other bytes of the device by owner: "context", "NCCL" and "cached"; empty on CPUs
    live       the registers alive at the peak, by the op that made them, the largest first
    predicted  what the plan allocates on this rank, with one block for all registers
    planned    the same by owner; profiles of before have none
    """

    rank: int
    pp_rank: int
    basis: Literal["storages", "allocator"]
    peak: int
    at: str
    owners: dict[str, int]
    reserved: int
    device: int
    process: dict[str, int]
    live: list[LiveRegisters]
    predicted: int
    planned: NotRequired[dict[str, int]]


class LiveRegisters(TypedDict):
    """Registers of the step that are alive at its peak, by the op that made them."""

    name: str
    count: int
    bytes: int


OtherStream = Literal["message", "gather", "collective", "copy"]


class StepTimeline(TypedDict):
    """A step in time: as it was planned, of each pipeline rank, and as it ran, of each rank.

    names      what lanes refer to by its place here
    measured   of the profiled step of median length
    """

    names: list[TimelineName]
    predicted: list[TimelineLane]
    measured: list[TimelineLane]


class TimelineName(TypedDict):
    """A name of the program, as of ops, and the part of the waterfall to which its time belongs. "": nothing runs."""

    name: str
    part: str


class TimelineLane(TypedDict):
    """The step of one rank; what is much too short to be seen is joined to its neighbours.

    rank         null: predicted, of all ranks of the pipeline rank
    picoseconds  of the step
    compute      name, picoseconds, name, picoseconds …: what the rank does or waits for; they add up to the step
    streams      what runs beside that
    """

    pp_rank: int
    rank: int | None
    picoseconds: int
    compute: list[int]
    streams: list[StreamSpans]


class StreamSpans(TypedDict):
    """What runs on another stream than compute. `spans`: name, start, picoseconds, name, start, picoseconds …"""

    kind: OtherStream
    spans: list[int]

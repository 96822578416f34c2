"""A sweep: cases, what was predicted of each, how far each is, and what was measured. Schema `penteract.sweep/1`.

    FOLDER/sweep.json                      SweepSettings, and the names of the cases in order
    FOLDER/cases/NAME/case.json            SweepCase, with its CasePrediction; only its limit may change
    FOLDER/cases/NAME/run.toml             the run in full, as `penteract train` takes it; written once
    FOLDER/cases/NAME/status.json          CaseStatus; replaced as a whole each time
    FOLDER/cases/NAME/result.json          CaseResult; written before the status says done
    FOLDER/cases/NAME/attempt-1/           of each attempt: job.json (CaseHandle), written once it is started;
                                           errors.jsonl, and logs of its ranks and of its launcher

Each JSON file is one object: the fields of its value, and `schema`. Units: bytes, seconds, MHz, W; times of day in UTC.
Readers leave out keys that they do not know. The files are the truth: there is no database, and no lock is needed on
NFS or Lustre, because a file is written next to its place and renamed over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "penteract.sweep/1"

State = Literal[
    "pending", "running", "done", "failed", "out of memory", "timed out", "lost", "skipped"
]  # skipped: predicted not to fit, so it was not run
ENDED: tuple[State, ...] = ("done", "failed", "out of memory", "timed out", "lost", "skipped")
LOSSES = 2  # of a case, at most: then it stays lost
MFU = "matmul parameters without the embedding lookup, full attention, of the dense peak in the compute dtype"

Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CasePrediction:
    """What was predicted of a case, before it ran. None: not predicted.

    allocated_bytes       of tensors on the fullest rank
    reserved_bytes        of torch's allocator there; `device_bytes` of its device
    usable_bytes          of a device that tensors may take; None where the device is not known
    step_s                None without a cluster: then no time was asked for. So are the rates
    basis                 where the rates come from, a phrase
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    usable_bytes: int | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    basis: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether tensors stay within what they may take; None: not known."""
        return None if self.usable_bytes is None else self.allocated_bytes <= self.usable_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCase:
    """One case: a run of a model on a layout.

    name                 of its folder, from its number: 007_tp2_zero1
    number               from 1, in the order of the sweep; of a plan's layouts, the plan's order
    origin               plan, grid or case
    varied               key of a run file -> value, for the keys in which this sweep's cases differ
    model, parameters    its name, and how many parameters it has
    layout, layout_text  settings as in `penteract plan --json`, and as `--layout` takes them
    ranks                processes: GPUs, or parts of a CPU
    limit_s              seconds after which the case is stopped
    precision            the recipe, as `precision.dtype`
    global_batch_size    sequences of a step, of `sequence_length` tokens
    model_flops          of a step, all ranks: the counter of MFU; `model_flops_causal` with half of attention
    """

    name: str
    number: int
    origin: Literal["plan", "grid", "case"]
    varied: dict[str, Value]
    model: str
    parameters: int
    layout: dict[str, Value]
    layout_text: str
    ranks: int
    limit_s: float
    precision: str
    global_batch_size: int
    sequence_length: int
    model_flops: int
    model_flops_causal: int
    predicted: CasePrediction

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseStatus:
    """How far a case is.

    state        `ENDED` has the states in which nothing runs
    since        when the state began
    attempt      0: none yet. What an earlier attempt writes is not taken
    losses       attempts that were lost, with their node or by a scheduler: after the first, the case is tried again
    exit_code    of the attempt, if it is known
    error        of a case that did not end well: `code`, `what`, `where`, `found`, `allowed`, `fix`, `exit_code`, as in
                 errors.jsonl
    gpu_seconds  of all attempts so far: seconds times ranks
    counted      the last attempt whose seconds are in it
    """

    state: State = "pending"
    since: str = ""
    attempt: int = 0
    losses: int = 0
    exit_code: int | None = None
    error: dict[str, Any] | None = None
    gpu_seconds: float = 0.0
    counted: int = 0

    @property
    def over(self) -> bool:
        """Whether it will not change any more: it ended, and is not to be tried again."""
        return self.state in ENDED and not (self.state == "lost" and self.losses < LOSSES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseHandle:
    """How an attempt is found again. `launcher`: what started it: local, slurm. `handle`: its name for the job, such as
    a job id. `since`: when it was started."""

    launcher: str
    handle: str
    since: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseMeasurement:
    """What was measured, in the timed steps unless it says otherwise.

    steps_s                     each timed step on the slowest rank; `step_s` is their median
    spread                      (90th - 10th percentile) / median of the timed steps
    warmup_s                    the steps before them
    losses                      of all steps, with those of the warm-up; null: not finite
    loss_falls                  whether the mean of the last three is below that of the first three
    void                        why the speed counts for nothing; empty: it counts
    mfu                         by `mfu_convention`; `mfu_causal` with half of attention; null: no known peak
    allocated_bytes             the peak of tensors, by rank
    reserved_bytes              the peak of torch's allocator, by rank; empty on a CPU
    device_bytes                in use on the device after the last step, by any process, by rank; empty on a CPU
    data                        random, or the source of the run
    routed_rows                 rows that each rank's experts were sent in the step whose memory was measured, by layer
                                and then micro-batch; empty where experts are on one rank
    imbalance                   rows of the fullest rank over even ones, on average over layers, micro-batches and steps
    """

    tokens_per_s_per_gpu: float
    step_s: float
    spread: float
    steps_s: tuple[float, ...]
    warmup_s: tuple[float, ...]
    losses: tuple[float | None, ...]
    loss_falls: bool
    void: str = ""
    mfu: float | None = None
    mfu_causal: float | None = None
    mfu_convention: str = MFU
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    device_bytes: tuple[int, ...] = ()
    data: str = "random"
    routed_rows: tuple[tuple[int, ...], ...] = ()
    imbalance: float = 1.0

    @property
    def fullest(self) -> int:
        """The rank that allocated most."""
        return self.allocated_bytes.index(max(self.allocated_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseProvenance:
    """Where a measurement comes from. An empty text or tuple: it could not be found out.

    versions      of penteract, python, torch, cuda, nccl, cudnn, driver: those that there are
    commit        of the package, with -dirty if its sources were changed
    device        of rank 0, as its driver names it
    hosts         of the ranks, each once
    began, ended  of the case's processes
    clock_mhz     of each rank's GPU right after the last timed step; `power_w` then, `power_limit_w`
    command       that made the sweep
    """

    versions: dict[str, str]
    commit: str
    device: str
    hosts: tuple[str, ...]
    began: str
    ended: str
    clock_mhz: tuple[int, ...] = ()
    power_w: tuple[float, ...] = ()
    power_limit_w: tuple[float, ...] = ()
    command: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """A case that was measured, by its attempt."""

    attempt: int
    measured: CaseMeasurement
    provenance: CaseProvenance


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """What all cases of a sweep share.

    steps, warmup       timed steps of a case, and steps before them
    limit_s             seconds after which a case is stopped, unless it has its own
    budget_gpu_minutes  of the whole sweep; null: no bound
    data                random, or run: the source of the run file
    cluster             for predictions, as `--gpus`; empty: memory alone is predicted
    asked               a digest of the question: the same command goes on with the same sweep
    cases               names, in order
    launcher            what starts them: local, slurm
    on_cpus             whether ranks are processes on CPUs: then budgets and costs are of processes, not of GPUs
    """

    name: str
    steps: int
    warmup: int
    limit_s: float
    data: str
    cluster: str
    command: str
    cases: tuple[str, ...]
    asked: str = ""
    launcher: str = "local"
    budget_gpu_minutes: float | None = None
    on_cpus: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """A case, how far it is, and its result once it is done."""

    case: SweepCase
    status: CaseStatus
    result: CaseResult | None = None

    @property
    def counts(self) -> bool:
        """Whether its speed may be ranked."""
        return self.status.state == "done" and self.result is not None and not self.result.measured.void


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A whole sweep. Rows are in the order of the cases."""

    settings: SweepSettings
    rows: tuple[SweepRow, ...] = field(default=())

    @property
    def ended(self) -> bool:
        """Whether every case has ended, in whatever way."""
        return all(row.status.over for row in self.rows)

    @property
    def ranked(self) -> list[SweepRow]:
        """The rows whose speed counts, the fastest first: by tokens a second and GPU."""
        good = [row for row in self.rows if row.counts]
        return sorted(good, key=lambda row: -row.result.measured.tokens_per_s_per_gpu if row.result else 0.0)

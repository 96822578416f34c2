"""The names of the parts of a step, in planned timelines and in profiles of runs."""

from __future__ import annotations

from collections.abc import Iterable

from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.schedule.actions import Transfer
from penteract.step.all_reduces import StepAllReduce

GATHER = "all_gather parameters"
REPLICATE = "all_reduce shards"
QUANTISE, NARROW, WIDEN, ADD = "quantise weights", "narrow gradients", "widen gradients", "add gradients"
MEASURE, UPDATE = "gradient norm: squares", "update"
LARGEST, ORTHOGONALISE = "largest weights", "orthogonalise"
WAIT_PARAMETERS, WAIT_GRADIENTS, WAIT_STAGE = "wait parameters", "wait gradients", "wait for a stage"
AND = ", "  # between the names of messages that are posted at once
# Only in runs: kernels of a few microseconds.
BEGIN, SCALES, FACTORS, END = "begin the step", "scales", "factors of the update", "end the step"
WAIT_SENT = "wait for what was sent"
# Only in planned timelines: a run calls nothing here, compute is idle.
WAIT_RANKS = "wait for other ranks"


def of_call(phase: Phase, site: Site) -> str:
    """The name of an instruction: phase, op, and the line of the network that recorded it."""
    return f"{phase} {site}"


def of_scale(call: str) -> str:
    """The name of the maximum over ranks for a call's FP8 scales; in a run it is inside the call."""
    return f"largest {call}"


def of_sum(b: Bucket) -> str:
    """The name of the reduction of a bucket's gradients."""
    return "reduce_scatter gradients" if b.shards > 1 else "all_reduce gradients"


def of_all_reduce(reduction: StepAllReduce) -> str:
    """The name of an all-reduce of a step."""
    return f"all_reduce {reduction.name}"


def of_matrices(kind: str) -> str:
    """The name of a collective on whole matrices (Muon)."""
    return f"{kind} matrices"


def of_message(kind: str, what: str) -> str:
    """The name of a message between stages: "send" or "recv" of a "value" or a "gradient"."""
    return f"{kind.lower()} {what}"


def of_transfers(transfers: Iterable[Transfer]) -> str:
    """The name of messages that are posted at once. Torch's profiler writes "unknown" for a name that is not ASCII."""
    return AND.join(map(of_transfer, transfers))


def of_transfer(t: Transfer) -> str:
    """The name of one rank's side of a message."""
    return of_message(t.kind, t.what)

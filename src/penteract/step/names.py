"""What the parts of a step are called: in a timeline that is planned, and in a profile of a run."""

from __future__ import annotations

from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.schedule.actions import Transfer
from penteract.step.agreements import Agreement

GATHER = "all_gather parameters"
REPLICATE = "all_reduce shards"
CODE, NARROW, WIDEN, ADD = "code", "narrow gradients", "widen gradients", "add gradients"
MEASURE, UPDATE = "squares", "update"
LARGEST, ORTHOGONALISE = "largest weights", "orthogonalise"
WAIT_PARAMETERS, WAIT_GRADIENTS, WAIT_STAGE = "wait parameters", "wait gradients", "wait for a stage"
# A run has no name for these: nothing is called, compute stands still between what is.
WAIT_SENT, WAIT_RANKS = "wait for what was sent", "wait for other ranks"


def of_call(phase: Phase, site: Site) -> str:
    """Of an instruction: what runs, and the line of the network that wrote it."""
    return f"{phase} {site}"


def of_scale(call: str) -> str:
    """Of the largest value that a call's codes are scaled by, over ranks; a run has it inside of the call."""
    return f"largest {call}"


def of_sum(b: Bucket) -> str:
    """Of the sum of a bucket's gradients."""
    return "reduce_scatter gradients" if b.shards > 1 else "all_reduce gradients"


def of_agreement(agreement: Agreement) -> str:
    """Of numbers on which ranks agree."""
    return f"all_reduce {agreement.name}"


def of_matrices(kind: str) -> str:
    """Of a collective on matrices that are moved as wholes."""
    return f"{kind} matrices"


def of_message(kind: str, what: str) -> str:
    """Of a message between stages: "send" or "recv" of a "value" or a "gradient"."""
    return f"{kind.lower()} {what}"


def of_transfer(t: Transfer) -> str:
    """Of a rank's half of a message."""
    return of_message(t.kind, t.what)

"""The small all-reduces of a step that belong to no call: numbers on which ranks agree before or after the actions.

Each is declared here once. A price counts it, a run reduces the tensor of its name, and the walk decides when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.quantised.fp8 import fp8_state_bytes
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket
from penteract.units import Bytes

Name = Literal["scales of weights", "target tokens", "routed counts", "largest values", "gradient norm and losses"]
OF_LINEAR = 3  # largest values of a linear layer: of its x, its w and its gradient
DIGITS, BITS = 4, 10  # of a count sent as floats: sums of so many bits stay exact in fp32 over 2^14 ranks


@dataclass(frozen=True, slots=True)
class StepAllReduce:
    """An all-reduce of `elements` numbers of `width` bytes over the ranks of `axis`; over one rank it does nothing."""

    name: Name
    kind: Literal["sum", "max"]
    axis: str
    elements: int
    width: Bytes

    @property
    def size(self) -> Bytes:
        """Bytes that each rank puts into the all-reduce."""
        return self.elements * self.width


def means(m: ModelSpec) -> tuple[str, ...]:
    """The loss terms that are means over targets."""
    return ("cross_entropy", "mtp") if m.mtp_layers else ("cross_entropy",)


def losses(m: ModelSpec) -> tuple[str, ...]:
    """The names of the loss terms, the same on every rank."""
    balance = ("balance",) if m.moe is not None and m.moe.balance == "loss" else ()
    return (*means(m), *(("z_loss",) if m.z_loss_coefficient else ()), *balance)


class OutsideTape(Protocol):
    """The members of `Program` (`step/program.py`) that decide a rank's work outside the tape."""

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""
        ...

    @property
    def rank(self) -> int:
        """The global number of the rank."""
        ...

    @property
    def widths(self) -> Widths:
        """Bytes of an element by role."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of the rank's parameters."""
        ...

    @property
    def quantised_weights(self) -> Sequence[Site]:
        """Linear layers of the rank whose weights are gathered in FP8."""
        ...

    @property
    def delayed_scaling(self) -> Sequence[Site]:
        """Linear layers of the rank whose FP8 scales come from past steps (delayed scaling)."""
        ...

    @property
    def balanced(self) -> Sequence[str]:
        """Names of the rank's routers that are balanced by a bias."""
        ...


def at_begin(p: OutsideTape, *, targets_counted: bool) -> tuple[StepAllReduce, ...]:
    """Before the first action: values that its calls read.

    A weight gathered in FP8 has one scale, from the largest value of all its shards. Loss terms are sums over the whole
    batch, divided by its number of targets. If `targets_counted`, the previous step has sent their number with its
    totals: a collective here would wait for all-gathers that are still in flight among the data ranks.
    """
    scales = sum(map(fp8_state_bytes, p.quantised_weights)) // FLOAT
    return _some(
        StepAllReduce("scales of weights", "max", "dp_cp_tp", scales, FLOAT),
        StepAllReduce("target tokens", "sum", "dp", 0 if targets_counted else len(means(p.model)), p.widths["index"]),
    )


def after_backward(p: OutsideTape) -> tuple[StepAllReduce, ...]:
    """After the last action, before the norm: counts and largest values of a stage's micro-batches."""
    experts = p.model.moe.experts if p.model.moe is not None else 0
    return _some(
        StepAllReduce("routed counts", "sum", "dp_cp_tp", len(p.balanced) * experts, p.widths["index"]),
        StepAllReduce("largest values", "max", "dp_cp_tp", len(p.delayed_scaling) * OF_LINEAR, FLOAT),
    )


def totals(p: OutsideTape) -> StepAllReduce:
    """One vector: the squared gradient norm, the loss terms, how many ranks got a request to stop, and the digits of
    the next step's number of targets."""
    return StepAllReduce(
        "gradient norm and losses",
        "sum",
        "world",
        2 + len(losses(p.model)) + DIGITS * len(means(p.model)),
        p.widths["stat"],
    )


def digits(count: int) -> list[int]:
    """A count below 2^40 as digits, the lowest first. Sums of each over ranks are integers that fp32 holds exactly."""
    return [count >> BITS * i & (1 << BITS) - 1 for i in range(DIGITS)]


def reports_targets(mesh: Mesh, rank: int) -> bool:
    """Whether this rank reports the next step's number of targets: one of all ranks that get the same sequences."""
    at = mesh.coordinates(rank)
    return at["pp"] == at["cp"] == at["tp"] == 0


def _some(*every: StepAllReduce) -> tuple[StepAllReduce, ...]:
    return tuple(a for a in every if a.elements)

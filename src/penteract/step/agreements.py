"""The small sums of a step that no call asks for: numbers on which ranks agree before an action, or after the last.

Each is declared here once. A price counts it, a run sums the tensor of its name, and the walk says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.declarations.fp8 import fp8_state_bytes
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.parallel.data import Bucket
from penteract.units import Bytes

Name = Literal["scales of weights", "target tokens", "routed counts", "largest values", "norm and losses"]
OF_LINEAR = 3  # the largest of its x, its w and its gradient
DIGITS, BITS = 4, 10  # of a count among floats: sums of so many bits stay exact in fp32 over 2^14 ranks


@dataclass(frozen=True, slots=True)
class Agreement:
    """An all-reduce of `elements` numbers of `width` bytes, over the ranks of `axis`; over one rank it is nothing."""

    name: Name
    kind: Literal["sum", "max"]
    axis: str
    elements: int
    width: Bytes

    @property
    def size(self) -> Bytes:
        """Bytes that each rank hands to the all-reduce."""
        return self.elements * self.width


def means(m: ModelSpec) -> tuple[str, ...]:
    """Those of the loss's terms that are means over targets."""
    return ("cross_entropy", "mtp") if m.mtp_layers else ("cross_entropy",)


def losses(m: ModelSpec) -> tuple[str, ...]:
    """The loss's terms, the same on every rank."""
    balance = ("balance",) if m.moe is not None and m.moe.balance == "loss" else ()
    return (*means(m), *(("z_loss",) if m.z_loss_coefficient else ()), *balance)


class OutsideTape(Protocol):
    """What decides a rank's work outside of the tape, as `step/program.py` has it."""

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
        """Linears of the rank whose weights are gathered as FP8 codes."""
        ...

    @property
    def delayed(self) -> Sequence[Site]:
        """Linears of the rank whose FP8 scales are made of past steps."""
        ...

    @property
    def balanced(self) -> Sequence[str]:
        """Names of the rank's routers whose choice a bias steers."""
        ...


def at_begin(p: OutsideTape, *, counted: bool) -> tuple[Agreement, ...]:
    """Before the first action: what its calls read.

    Weights that travel as codes have a scale each, made of the largest of all shards. Loss terms are sums over the
    whole batch, and are scaled by its targets, unless these are `counted`: the step before told them with its totals.
    A collective here would wait, on the wires of the data ranks, for all shards that are still being gathered.
    """
    scales = sum(map(fp8_state_bytes, p.quantised_weights)) // FLOAT
    return _some(
        Agreement("scales of weights", "max", "stage", scales, FLOAT),
        Agreement("target tokens", "sum", "dp", 0 if counted else len(means(p.model)), p.widths["index"]),
    )


def after_backward(p: OutsideTape) -> tuple[Agreement, ...]:
    """After the last action, before the norm: what a stage's micro-batches have counted and seen."""
    experts = p.model.moe.experts if p.model.moe is not None else 0
    return _some(
        Agreement("routed counts", "sum", "stage", len(p.balanced) * experts, p.widths["index"]),
        Agreement("largest values", "max", "stage", len(p.delayed) * OF_LINEAR, FLOAT),
    )


def totals(p: OutsideTape) -> Agreement:
    """The squared norm of the gradient, the loss's terms, how many ranks were asked to stop, and the digits of the next
    step's targets: one vector."""
    return Agreement(
        "norm and losses", "sum", "world", 2 + len(losses(p.model)) + DIGITS * len(means(p.model)), p.widths["stat"]
    )


def digits(count: int) -> list[int]:
    """A count of less than 2^40, the lowest digits first. Sums over ranks of each are integers that fp32 has."""
    return [count >> BITS * i & (1 << BITS) - 1 for i in range(DIGITS)]


def reports_targets(mesh: Mesh, rank: int) -> bool:
    """Whether this rank tells the next step's targets: one of all that are fed the same sequences."""
    at = mesh.coordinates(rank)
    return at["pp"] == at["cp"] == at["tp"] == 0


def _some(*every: Agreement) -> tuple[Agreement, ...]:
    return tuple(a for a in every if a.elements)

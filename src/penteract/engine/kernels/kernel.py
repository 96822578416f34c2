"""The interface of a kernel, and the environment that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from penteract.config.mesh import Mesh
from penteract.engine.device.zeros import Zeros
from penteract.ops.tape import Site

Tensors = list[Any]  # tensors; a host value where the spec's role is "host"


def _no_peers(axis: str, x: torch.Tensor) -> None:
    """The maximum over one rank: x is unchanged."""


@dataclass(slots=True)
class Env:
    """The rank of a kernel, and the step's values on the device: everything that changes between steps is a tensor.

    `all_reduce_max(axis, x)`: element-wise maximum of x over an axis's ranks, in place.
    `overflow`: None where nobody needs to know.
    """

    mesh: Mesh
    rank: int
    stat: torch.dtype
    scale: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # of each loss term
    loss_scale: torch.Tensor | None = None  # factor of the whole loss, with fp16 loss scaling
    losses: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # sums of this step
    biases: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # of routers, [X]
    tokens_per_expert: dict[str, torch.Tensor] = field(
        default_factory=dict[str, torch.Tensor]
    )  # choices of this step, [X]
    all_reduce_max: Callable[[str, torch.Tensor], None] = _no_peers
    past_amax: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # of FP8 linear layers, [3]: of
    amax: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # x, w and g; past steps, this step
    scales: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # of weights gathered in FP8, [1]
    largest_weights: dict[str, torch.Tensor] = field(
        default_factory=dict[str, torch.Tensor]
    )  # of weights that are cast once, [1]: where the update finds it; by the first weight of a product
    zeros: Zeros = field(default_factory=partial(Zeros, 0, torch.device("cpu")))  # for casts to FP8
    clear_rows: frozenset[str] = frozenset()  # tables whose gradients keep rows clear that no token uses
    overflow: torch.Tensor | None = None  # []: NaN once copies did not fit their block: the step is void

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        return self.mesh.index(axis, self.rank)


Forward = Callable[[Env, Site, Tensors, Tensors, Tensors], None]  # env, site, ins, weights, outs
InputGradient = Callable[[Env, Site, Tensors, Tensors, Tensors], None]  # env, site, kept + gradients, weights, outs
WeightGradient = Callable[[Env, Site, Tensors, Tensors, bool], None]  # env, site, kept + gradients, into, add


Bound = Callable[[], object]  # a call of a phase, with its tensors


@dataclass(frozen=True, slots=True)
class Bindable:
    """A phase that makes views of its tensors once for calls that have the same ones: `bind` takes what the phase
    takes, and gives what makes the call, as often as it is asked to."""

    bind: Callable[..., Bound]

    def __call__(self, *about: Any) -> None:
        """The call itself, once."""
        self.bind(*about)()


def bound(phase: Callable[..., None], *about: Any) -> Bound:
    """A call of a phase with its tensors."""
    return phase.bind(*about) if isinstance(phase, Bindable) else partial(phase, *about)


def in_turn(*calls: Bound) -> Bound:
    """Several as one."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


class LaunchReached(Exception):
    """Where kernels are only compiled: all that a call needs is, and what is left needs a GPU."""


Apart = Callable[[Callable[..., Any]], Callable[..., Any]]


class WithoutGpu(NamedTuple):
    """How a package compiles for GPUs that are not here.

    environment  what it reads where it would ask the GPU; set before any package is imported
    load         imports it, with nothing that another package would notice -> the folder where it keeps kernels
    before       what a call needs beside that, in a process that calls no other package. It may replace a function
                 that compiles by what it is given makes of it: that compiles in a process of its own, beside others,
                 and returns nothing of use
    """

    environment: Mapping[str, str]
    load: Callable[[], str]
    before: Callable[[Apart], None]


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """One op on torch: results are written into `outs`, weight gradients written or added `into` views of buckets."""

    forward: Forward
    input_gradient: InputGradient | None = None
    weight_gradient: WeightGradient | None = None


def put(into: torch.Tensor, value: torch.Tensor, add: bool) -> None:
    """Write or add a gradient."""
    if add:
        into.add_(value)
    else:
        into.copy_(value)


def put_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Write or add a @ b; without a temporary if the dtypes are equal."""
    if into.dtype != a.dtype:
        put(into, a @ b, add)
    elif add:
        torch.addmm(into, a, b, out=into)
    else:
        torch.mm(a, b, out=into)

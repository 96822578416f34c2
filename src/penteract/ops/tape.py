"""The recorded program: sites (an op and its source line), op calls (the graph) and calls (the instructions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penteract.ops.spec import Spec

Phase = Literal["forward", "input_gradient", "weight_gradient", "start", "finish"]


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One recorded op: what all its phases share (shapes, parameters, attributes), and the line that recorded it."""

    op_name: str
    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]  # results, then extras (kept for backward in addition)
    params: tuple[str, ...] = ()
    weights: tuple[tuple[int, ...], ...] = ()  # local shapes of the params
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layer: int = -1
    line: str = ""

    def __str__(self) -> str:
        """The op and the line that recorded it: `linear (model/mlp.py:31)`."""
        return f"{self.op_name} ({self.line})"


Rows = Literal["all", "own", "others"]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The sites in the place of one (`overlap/in_parts.py`): of an op, that of this rank's share of the rows and that
    of all others; of a reduce-scatter, an exchange and a sum."""

    first: Site
    second: Site


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One instruction: a phase of a site on registers.

    forward          ins                    -> outs, extras
    input_gradient   kept, gradients        -> gradients of the differentiable ins, carry
    weight_gradient  kept, carry | gradients -> (written into the gradients of site.params)
    start / finish   a collective: `finish` takes (input, output), so neither is freed while it is in flight

    `rows`: of tensors that have more rows than the site says, those of this rank's share or all others. `fills`: how
    many of the last `ins` are results that an earlier call has made, of which this one writes its rows.
    """

    site: Site
    phase: Phase
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    rows: Rows = "all"
    fills: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RedistributionProgram:
    """A recorded redistribution: two conjugate lists of calls, and what the second needs of the first."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    kept: tuple[int, ...]
    gradients_in: tuple[int, ...]  # registers of the gradients of the outs
    gradients_out: tuple[int, ...]  # gradients of the ins through which a gradient flows


@dataclass(frozen=True, slots=True, eq=False)
class OpCall:
    """A node of the tape: a declared op, a redistribution (`program`), or a fork.

    `passed`: of an op that is a fork too, the value of its first in for that in's other reader.
    `stands_for`: the op of the network that a fused one is recomputed and offloaded as.
    `joint`: the site of one call for the forward of this op and of the one before it on the tape, whose result it
    reads. Backward, and what is recomputed, are those of the two ops.
    `joint_back`: the site of one call for the input gradients of this op and of the one that reads its result, which
    is what the gradient of that result is never made for. All else is that of the two ops.
    `again`: what makes the first result again from the extras, where that is cheaper than this op, up to rounding: a
    kernel of this op may not round the extras before it makes the result. That result goes by its name too.
    `joint_again`: the site of `joint_back` that makes that result again, too, from the extras that it reads anyway.
    `parts`, `parts_back`: of the site, and of that of `joint_back`, if they are called in parts; of a redistribution's
    reduce-scatter, forward and back.
    """

    site: Site
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    extras: tuple[int, ...] = ()
    program: RedistributionProgram | None = None
    passed: int | None = None
    stands_for: str = ""
    joint: Site | None = None
    joint_back: Site | None = None
    again: OpCall | None = None
    joint_again: Site | None = None
    parts: Parts | None = None
    parts_back: Parts | None = None

    @property
    def name(self) -> str:
        """Under which a layout recomputes or offloads its results; see `names` for those of one result."""
        return self.stands_for or self.site.op_name

    def again_for(self, r: int) -> OpCall | None:
        """`again`, if r is what it makes."""
        return self.again if self.again is not None and r in self.again.outs else None

    def names(self, r: int) -> frozenset[str]:
        """The names under which a layout recomputes or offloads one of its results."""
        return frozenset([self.name, *([again.name] if (again := self.again_for(r)) else [])])

    @property
    def ends(self) -> bool:
        """Whether it is a redistribution without results. In training all of its calls are in backward."""
        return self.program is not None and not self.outs


@dataclass(slots=True)
class Tape:
    """The recorded program of one model chunk. `specs[i]` is value i's shape and role."""

    specs: list[Spec] = field(default_factory=list)
    ops: list[OpCall] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)  # data by name: resident, never freed
    flows: list[bool] = field(default_factory=list)  # does a gradient flow through value i
    # Values that recomputation never drops -> the layer whose input each is; -1: the output of the last layer.
    layer_inputs: dict[int, int] = field(default_factory=dict[int, int])
    entry: int | None = None  # from the previous stage
    exit: int | None = None  # for the next stage

    def new(self, spec: Spec, flows: bool) -> int:
        """Add a value; `flows`: whether a gradient flows through it. -> its register, an index into `specs`"""
        self.specs.append(spec)
        self.flows.append(flows)
        return len(self.specs) - 1

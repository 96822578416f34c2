"""The weights that a run starts from: an element is a function of (seed, name of the parameter, index in the global
tensor) alone, so every layout starts from the same model.

A rank draws on its own device, and only elements that it keeps. Devices agree to the last bit: until the numbers are
rounded to what is stored, they come of integers, of a table that the host makes, and of products and sums of fp32, each
of which is rounded by itself. Where a run computes with Triton's kernels, one of them draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any

import torch

from penteract.engine.state.counter_random import STRIDE, ParameterSlice, mix
from penteract.engine.state.set_parameters import Elements, set_parameters
from penteract.engine.state.state import TrainingState
from penteract.ops.params import Param
from penteract.step.program import Program

_KERNEL = "penteract.engine.executor.draw_kernel"  # Triton is imported where it is used
CELLS = 2**14
FINE = 2**24  # places in a cell: as many as fp32 tells apart in it
PLACE = 40  # the first of the bits that tell a number's place in its cell


def initialise(p: Program, state: TrainingState, seed: int) -> None:
    """Draw parameters, and their master weights."""
    if not state.routed.is_meta:  # which has no numbers
        table, by_kernel = Quantiles.on(state.routed.device), state.routed.is_cuda and p.layout.elementwise == "triton"
        set_parameters(state, ((q, elements_of(p, q, seed, table, by_kernel=by_kernel)) for q in p.params))


def elements_of(p: Program, q: Param, seed: int, table: Quantiles, *, by_kernel: bool = False) -> Elements:
    """What draws elements of this rank's rectangle of a parameter, where the table is."""
    device = table.middles.device
    if q.scale is None:
        return lambda part: torch.full((part.stop - part.start,), q.fill, device=device)
    whole = ParameterSlice.of(q, p.mesh, p.rank, at=0, begin=0, count=q.numel(p.mesh))
    start, scale = whole.start(seed, "initial"), q.scale
    kernel: Any = import_module(_KERNEL) if by_kernel else None

    def drawn(part: slice) -> torch.Tensor:
        if kernel is not None and len(whole.gaps) <= kernel.GAPS:
            out = torch.empty(part.stop - part.start, device=device)
            kernel.draw(out, whole, part.start, start, scale, table.middles, table.steps, PLACE)
            return out
        z = torch.empty(part.stop - part.start, dtype=torch.int64, device=device)
        whole.put_global_indices(z, part.start)
        return table.normal(mix(z.mul_(STRIDE).add_(start))).mul_(scale)

    return drawn


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The normal distribution as CELLS intervals of one probability each, within which numbers are spread evenly:
    `middles` and `steps`, a FINE part of the widths; fp32 [CELLS].

    The outer ends of the first and last cell, 4.28 deviations from 0, are where the variance is 1.
    """

    middles: torch.Tensor
    steps: torch.Tensor

    @staticmethod
    def on(device: torch.device) -> Quantiles:
        """The same table on every device: the host makes it in fp64."""
        ends = torch.special.ndtri(torch.arange(CELLS // 2, CELLS, dtype=torch.float64) / CELLS)  # from 0 on
        squares = (ends[:-1].square() + ends[:-1] * ends[1:] + ends[1:].square()).sum() / 3  # of all but the last cell
        a, rest = ends[-1].item(), 3 * (CELLS / 2 - squares.item())
        outer = (sqrt(4 * rest - 3 * a * a) - a) / 2  # a² + a·outer + outer² = rest
        ends = torch.cat((ends, ends.new_tensor([outer])))
        middles, steps = (ends[1:] + ends[:-1]) / 2, ends.diff() / FINE
        whole = torch.cat((-middles.flip(0), middles)), torch.cat((steps.flip(0), steps))
        return Quantiles(*(x.float().to(device) for x in whole))

    def normal(self, z: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers of random bits int64 [n], which are lost: fp32 [n].

        The lowest 14 bits choose the cell, the highest 24, with their sign, a place from its middle on. A product and
        its sum in one operation would be rounded once, by devices that have one.
        """
        cell = z & (CELLS - 1)
        numbers = z.bitwise_right_shift_(PLACE).float()
        numbers.mul_(self.steps.index_select(0, cell))
        return numbers.add_(self.middles.index_select(0, cell))

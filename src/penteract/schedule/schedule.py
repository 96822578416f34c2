"""A pipeline schedule as a value: what each rank computes in which order, and properties that others rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import inf

from penteract.errors import Bug
from penteract.schedule.actions import ComputeList


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The global stage of each model chunk of each pipeline rank. Compared by identity: make one for each (pp, vpp).

    stages         by rank and chunk; ascending on a rank, as a forward pass takes its chunks in this order
    locations      (rank, chunk) of each stage: the inverse
    reached        ranks in the order in which the first micro-batch reaches them

    Raises Bug("SCHEDULE") unless every stage from 0 on is on exactly one rank, and all ranks have equally many.
    """

    stages: tuple[tuple[int, ...], ...]
    locations: tuple[tuple[int, int], ...] = field(init=False)
    reached: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the stages, and derive the owner of each and the order in which ranks are reached. Raises Bug."""
        found = {s: (rank, chunk) for rank, own in enumerate(self.stages) for chunk, s in enumerate(own)}
        ascending = all(tuple(sorted(own)) == own and len(own) == self.vpp for own in self.stages)
        if not ascending or sorted(found) != list(range(self.pp * self.vpp)):
            raise Bug("SCHEDULE", "not a placement of stages", found=str(self.stages))
        object.__setattr__(self, "locations", tuple(found[s] for s in sorted(found)))
        object.__setattr__(self, "reached", tuple(sorted(range(self.pp), key=self.stages.__getitem__)))

    @property
    def pp(self) -> int:
        """How many pipeline ranks there are."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """How many model chunks (virtual stages) each rank has."""
        return len(self.stages[0])


@cache
def round_robin(pp: int, vpp: int) -> Placement:
    """Stage s is chunk s // pp of rank s % pp: a value goes from the last rank back to the first."""
    return Placement(tuple(tuple(range(rank, pp * vpp, pp)) for rank in range(pp)))


def _steady_after(pp: int, vpp: int) -> int:
    """A warm-up fills all ranks; twice with several chunks, as rounds of pp micro-batches go through one after
    another."""
    return pp if vpp == 1 else 2 * pp


def _period(pp: int, vpp: int) -> int:
    """With several chunks, each takes a round of pp micro-batches in turn."""
    return pp if vpp > 1 else 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """A pipeline schedule. Sizes: pp pipeline ranks, vpp model chunks per rank, micro-batches.

    name            in run files and on command lines
    compute         (pp, vpp, micro-batches) -> what each rank computes, in order
    placement       (pp, vpp) -> the stages of each rank; the same object for the same sizes
    min_pp …        sizes for which it exists, ends included
    needs_multiple_of_pp  whether the number of micro-batches must be a multiple of pp
    split_backward  whether input and weight gradients are actions of their own (`Inp`, `Wgt`), not one (`Bwd`)
    overlapped      whether passes alternate instruction by instruction (`Overlapped`); the clock does not simulate
                    such schedules, so layouts cannot use them
    alternates      whether backwards begin as soon as possible, so that from `steady_after` on no more micro-batches
                    are in flight; else all forwards come first, and each further micro-batch keeps as much as the last
    steady_after    (pp, vpp) -> micro-batches after which one period more only repeats one in each list
    period          (pp, vpp) -> the period of a list, in micro-batches
    """

    name: str
    compute: Callable[[int, int, int], list[ComputeList]]
    placement: Callable[[int, int], Placement] = round_robin
    min_pp: int = 1
    max_pp: float = inf
    min_vpp: int = 1
    max_vpp: float = 1
    needs_multiple_of_pp: bool = False
    split_backward: bool = False
    overlapped: bool = False
    alternates: bool = True
    steady_after: Callable[[int, int], int] = _steady_after
    period: Callable[[int, int], int] = _period

    def round(self, pp: int) -> int:
        """The number of micro-batches must be a multiple of this."""
        return pp if self.needs_multiple_of_pp else 1

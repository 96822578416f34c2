"""A pipeline schedule as a value: who computes what in which order, and what others must know of it unplayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import inf

from penteract.errors import Bug
from penteract.schedule.actions import ComputeList


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which global stage each model chunk of each pipeline rank is. Compared by identity: make one for each (pp, vpp).

    stages         by rank and chunk; ascending on a rank, as a forward pass takes its chunks in this order
    owning_stages  (rank, chunk) of each stage: the inverse
    reached ranks in the order in which the first micro-batch comes to them

    Raises Bug("SCHEDULE") unless every stage from 0 on has one home, and all ranks have as many.
    """

    stages: tuple[tuple[int, ...], ...]
    owning_stages: tuple[tuple[int, int], ...] = field(init=False)
    reached: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the stages, and derive who owns each and in which order ranks are reached. Raises Bug, SCHEDULE."""
        found = {s: (rank, chunk) for rank, own in enumerate(self.stages) for chunk, s in enumerate(own)}
        ascending = all(tuple(sorted(own)) == own and len(own) == self.vpp for own in self.stages)
        if not ascending or sorted(found) != list(range(self.pp * self.vpp)):
            raise Bug("SCHEDULE", "not a placement of stages", found=str(self.stages))
        object.__setattr__(self, "owning_stages", tuple(found[s] for s in sorted(found)))
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
    """Stage s is chunk s // pp of rank s % pp: a value that leaves the last rank goes on at the first."""
    return Placement(tuple(tuple(range(rank, pp * vpp, pp)) for rank in range(pp)))


def _steady_after(pp: int, vpp: int) -> int:
    """A warm-up fills the ranks; of several chunks, twice, as a round of pp passes through one after the other."""
    return pp if vpp == 1 else 2 * pp


def _turn(pp: int, vpp: int) -> int:
    """Several chunks take turns, a round of pp micro-batches each."""
    return pp if vpp > 1 else 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """All that is known of a schedule by name. Sizes: pp pipeline ranks, vpp model chunks a rank, micro-batches.

    name            as run files and command lines have it
    compute         (pp, vpp, micro-batches) -> what each rank computes, in order
    placement       (pp, vpp) -> which stages each rank has; the same object for the same sizes
    least_pp …      sizes that it exists for, ends included
    rounds          whether micro-batches come in whole rounds of pp
    split_backward  whether input and weight gradients are actions of their own (`Inp`, `Wgt`), not one (`Bwd`)
    overlapped      whether passes are walked in turns (`Overlapped`); the clock plays none, so no layout names
                    such
    alternates      whether backwards begin as soon as they can, so that no more micro-batches are in flight from
                    `steady_after` on; else all forwards come first, and each micro-batch keeps as much as the last
    steady_after    (pp, vpp) -> micro-batches after which one turn more changes no list but by one more of the same
    turn            (pp, vpp) -> micro-batches after which a list repeats itself
    """

    name: str
    compute: Callable[[int, int, int], list[ComputeList]]
    placement: Callable[[int, int], Placement] = round_robin
    least_pp: int = 1
    most_pp: float = inf
    least_vpp: int = 1
    most_vpp: float = 1
    rounds: bool = False
    split_backward: bool = False
    overlapped: bool = False
    alternates: bool = True
    steady_after: Callable[[int, int], int] = _steady_after
    turn: Callable[[int, int], int] = _turn

    def round(self, pp: int) -> int:
        """The number that micro-batches are a multiple of."""
        return pp if self.rounds else 1

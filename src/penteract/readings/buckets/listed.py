"""The bucket plans of a rank one by one, and where its units' parameters are in them. Layouts that are packed alike
share one list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from penteract.ops.params import Param
from penteract.parallel.bucket_plans import BucketPlan


class ListedUnit(NamedTuple):
    """A unit of a rank: the parameters that it is the first to use. `again`: the names of all that it uses, if other
    units may use them, too."""

    params: Sequence[Param]
    again: Iterable[str] = ()


class ListedPlans(NamedTuple):
    """The bucket plans of a rank.

    plans  in the order in which backward finishes them
    alike  of each plan: the first that is of the same kind
    of     of each unit: parameter -> the number of its plan
    """

    plans: tuple[BucketPlan, ...]
    alike: tuple[int, ...]
    of: Sequence[Mapping[str, int]]


def listed(plans: Iterable[BucketPlan], units: Sequence[ListedUnit]) -> ListedPlans:
    """List the plans of a rank with these units, in the order of forward."""
    every, first = tuple(plans), dict[Hashable, int]()
    alike = tuple([first.setdefault(plan.kind, i) for i, plan in enumerate(every)])
    return ListedPlans(every, alike, _owners(every, units))


def _owners(plans: Sequence[BucketPlan], units: Sequence[ListedUnit]) -> Sequence[Mapping[str, int]]:
    """The plan of each parameter, by unit. Equal layers share `Param` objects: plans take them in the order of
    backward."""
    owning, others = defaultdict[int, list[int]](list), defaultdict[str, list[int]](list)
    for number in reversed(range(len(units))):
        for p in units[number].params:
            owning[id(p)].append(number)
        for name in units[number].again:  # embedding and head may be tied
            others[name].append(number)
    turn, of = {p: iter(some) for p, some in owning.items()}, [dict[str, int]() for _ in units]
    for i, plan in enumerate(plans):
        for p in plan.params:
            of[next(turn[id(p)])][p.name] = i
            for other in others.get(p.name, ()):
                of[other][p.name] = i
    return of

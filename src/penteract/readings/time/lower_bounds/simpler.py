"""What a layout's passes take at least, by those of a simpler layout: with less tensor or context parallelism, or with
a backward in one action. Most families of layouts are so slow that a search needs no passes of their own.

A rank among twice as many has half of the work, and its calls are no more efficient; collectives come on top. So half
of the tensor or context parallelism takes at most twice as long. Context parallelism begins at two: without any, other
kernels may serve attention. Layouts that spread experts are left out: how many are on a rank depends on both degrees. A
backward that is split in two takes no less than a whole one: what ran beside a collective runs after it.
`tests/readings/test_simpler.py` checks this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import TYPE_CHECKING

from penteract.config.layout import Layout

if TYPE_CHECKING:
    from penteract.readings.time.lower_bounds.passes import Passes

SimplerMesh = tuple[int, int]  # tp, cp
_DEFAULT = Layout().schedule
ROUNDED = 1 - 1e-12  # sums of the same seconds in another order


@cache  # a search asks for each family, several times
def simpler_meshes(tp: int, cp: int, ep: int, expert_tp: int) -> tuple[SimplerMesh, ...]:
    """Meshes whose passes bound those of a layout with these degrees: the simplest first, its own last."""
    found = [(tp, cp)]
    if ep > 1 or expert_tp > 1:
        return tuple(found)
    while cp % 4 == 0:
        found.append((tp, cp := cp // 2))
    while tp % 2 == 0:
        found.append((tp := tp // 2, cp))
    return tuple(reversed(found))


def with_whole_backward(layout: Layout) -> Layout:
    """The layout with the default schedule, if its own splits the backward and both put the same stages on each rank;
    else itself."""
    if not layout.split_backward or layout.vpp > 1:
        return layout
    whole = layout.put(schedule=_DEFAULT)
    return whole if whole.placement == layout.placement else layout


def without_order_of_backward(passes: Sequence[Passes]) -> Sequence[Passes]:
    """The passes of a whole backward, for a split one: when its gradients go back, and what is left to do then, is not
    known."""
    return [p._replace(late=inf, off=0.0) for p in passes]

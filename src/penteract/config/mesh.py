"""Ranks, their coordinates and their groups. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product

from penteract.config.layout import Layout


@dataclass(frozen=True, slots=True)
class Axis:
    """Groups of one name: `size` ranks each, `stride` ranks apart.

    dimension  the name under which the time of its redistributions is reported; empty: the network has none over it
    crosses    whether every network has redistributions over it, so that every run needs its process groups
    """

    size: Callable[[Layout], int]
    stride: Callable[[Layout], int]
    dimension: str = ""
    crosses: bool = False


AXES: dict[str, Axis] = {
    "tp": Axis(lambda lay: lay.tp, lambda lay: 1, "tensor", crosses=True),
    "cp": Axis(lambda lay: lay.cp, lambda lay: lay.tp, "context", crosses=True),
    "ep": Axis(lambda lay: lay.ep, lambda lay: lay.tp, "expert", crosses=True),  # neighbours in (dp, cp)
    "sequence": Axis(lambda lay: lay.cp * lay.tp, lambda lay: 1, "expert"),  # the ranks that share one sequence
    "dp": Axis(lambda lay: lay.dp, lambda lay: lay.cp * lay.tp),
    "pp": Axis(lambda lay: lay.pp, lambda lay: lay.rows * lay.tp),
    "dp_cp_tp": Axis(lambda lay: lay.rows * lay.tp, lambda lay: 1),
    "world": Axis(lambda lay: lay.world, lambda lay: 1),
}


@dataclass(frozen=True)
class Mesh:
    """The grid of one layout: pp, dp, cp, tp, outermost first, so tensor ranks are neighbours. Group members are listed
    in rank order, which is their order in collectives."""

    layout: Layout
    _groups: dict[tuple[str, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int], tuple[int, ...]], compare=False, repr=False
    )

    def coordinates(self, rank: int) -> dict[str, int]:
        """rank -> {pp, dp, cp, tp, ep, edp}; the index dp·size(cp) + cp splits into (edp, ep)."""
        lay, (pp, row, tp) = self.layout, self.place(rank)
        dp, cp = divmod(row, lay.cp)
        edp, ep = divmod(row, lay.ep)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "edp": edp}

    def place(self, rank: int) -> tuple[int, int, int]:
        """rank -> pp, its index in (dp, cp), tp"""
        rest, tp = divmod(rank, self.layout.tp)
        return *divmod(rest, self.layout.rows), tp

    def index(self, axis: str, rank: int) -> int:
        """rank -> its index in its group of an axis"""
        found = AXES[axis]
        return rank // found.stride(self.layout) % found.size(self.layout)

    def ranks(self, pp: Iterable[int], rows: Iterable[int], tp: Iterable[int]) -> tuple[int, ...]:
        """The ranks at these coordinates, ascending; `rows` are indices in (dp, cp)."""
        each, columns = self.layout.rows, list(tp)
        places = [p * each + row for p, row in product(pp, list(rows))]
        return tuple(place * self.layout.tp + t for place in places for t in columns)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group `name`, ascending."""
        if (name, rank) not in self._groups:
            self._groups[name, rank] = self._group(name, rank)
        return self._groups[name, rank]

    def _group(self, name: str, rank: int) -> tuple[int, ...]:
        block, stride = self.block(name)
        begin = rank // block * block
        return tuple(range(begin + rank % stride, begin + block, stride))

    def block(self, name: str) -> tuple[int, int]:
        """-> (block, stride): a group of this name is every `stride`-th rank of a block of consecutive ranks."""
        stride = AXES[name].stride(self.layout)
        return AXES[name].size(self.layout) * stride, stride

    def size(self, name: str) -> int:
        """The number of ranks of a group `name` (the same for every rank)."""
        return AXES[name].size(self.layout)

    def neighbour(self, rank: int, pp_rank: int) -> int:
        """The rank on pipeline coordinate `pp_rank` with the same dp, cp and tp as `rank`."""
        return self.group("pp", rank)[pp_rank]

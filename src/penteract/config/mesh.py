"""Ranks and coordinates: who sits where, and which ranks form a group. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from penteract.config.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The grid of one layout: pp, dp, cp, tp, the outermost first, so tensor ranks are neighbours. Group members are
    listed in rank order, which is their order on the wire."""

    layout: Layout
    _groups: dict[tuple[str, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int], tuple[int, ...]], compare=False, repr=False
    )

    def coordinates(self, rank: int) -> dict[str, int]:
        """rank -> {pp, dp, cp, tp, ep, edp}; (dp, cp) read as one number splits into (edp, ep)."""
        lay, (pp, row, tp) = self.layout, self.place(rank)
        dp, cp = divmod(row, lay.cp)
        edp, ep = divmod(row, lay.ep)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep, "edp": edp}

    def place(self, rank: int) -> tuple[int, int, int]:
        """rank -> pp, its place in (dp, cp) read as one number, tp"""
        rest, tp = divmod(rank, self.layout.tp)
        return *divmod(rest, self.layout.rows), tp

    def index(self, axis: Literal["tp", "ep"], rank: int) -> int:
        """rank -> its place in a group that cuts parameters"""
        _, row, tp = self.place(rank)
        return tp if axis == "tp" else row % self.layout.ep

    def ranks(self, pp: Iterable[int], rows: Iterable[int], tp: Iterable[int]) -> tuple[int, ...]:
        """The ranks at these coordinates, ascending; `rows` are places in (dp, cp) read as one number."""
        each, columns = self.layout.rows, list(tp)
        places = [p * each + row for p, row in product(pp, list(rows))]
        return tuple(place * self.layout.tp + t for place in places for t in columns)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group `name`, ascending."""
        if (name, rank) not in self._groups:
            self._groups[name, rank] = self._group(name, rank)
        return self._groups[name, rank]

    def _group(self, name: str, rank: int) -> tuple[int, ...]:
        block, step = self.block(name)
        begin = rank // block * block
        return tuple(range(begin + rank % step, begin + block, step))

    def block(self, name: str) -> tuple[int, int]:
        """How groups of this name lie: each among so many neighbours, every so manieth of them."""
        lay = self.layout
        match name:
            case "tp":
                return lay.tp, 1
            case "cp":
                return lay.cp * lay.tp, lay.tp
            case "dp":
                return lay.rows * lay.tp, lay.cp * lay.tp
            case "pp":
                return lay.world, lay.rows * lay.tp
            case "ep":  # neighbours in (dp, cp): experts fold over both
                return lay.ep * lay.tp, lay.tp
            case "sequence":  # who share one sequence's tokens
                return lay.cp * lay.tp, 1
            case "stage":
                return lay.rows * lay.tp, 1
            case "world":
                return lay.world, 1
            case _:
                raise ValueError(f"no group named {name}")

    def size(self, name: str) -> int:
        """How many ranks a group `name` has (the same for every rank)."""
        lay = self.layout
        match name:
            case "world":
                return lay.world
            case "sequence":
                return lay.cp * lay.tp
            case "stage":
                return lay.rows * lay.tp
            case _:
                return getattr(lay, name)

    def neighbour(self, rank: int, stage: int) -> int:
        """The rank on pipeline coordinate `stage` with the same dp, cp and tp as `rank`."""
        return self.group("pp", rank)[stage]

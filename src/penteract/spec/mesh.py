"""Ranks and coordinates: who sits where, and which ranks form a group. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

from penteract.spec.layout import Layout

AXES = ("pp", "dp", "cp", "tp")  # outermost first: tensor ranks are neighbours


@dataclass(frozen=True)
class Mesh:
    """The grid of one layout. Group members are listed in rank order, which is their order on the wire."""

    layout: Layout
    _groups: dict[tuple[str, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int], tuple[int, ...]], compare=False, repr=False
    )

    def coordinates(self, rank: int) -> dict[str, int]:
        """rank -> {pp, dp, cp, tp, ep, edp}; (dp, cp) read as one number splits into (edp, ep)."""
        at, rest = dict[str, int](), rank
        for axis in reversed(AXES):
            rest, at[axis] = divmod(rest, int(getattr(self.layout, axis)))
        at["edp"], at["ep"] = divmod(at["dp"] * self.layout.cp + at["cp"], self.layout.ep)
        return at

    def ranks(self, pp: Iterable[int], rows: Iterable[int], tp: Iterable[int]) -> tuple[int, ...]:
        """The ranks at these coordinates, ascending; `rows` are places in (dp, cp) read as one number."""
        each, columns = self.layout.dp * self.layout.cp, list(tp)
        places = [p * each + row for p, row in product(pp, list(rows))]
        return tuple(place * self.layout.tp + t for place in places for t in columns)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group `name`, ascending."""
        if (name, rank) not in self._groups:
            self._groups[name, rank] = self._group(name, rank)
        return self._groups[name, rank]

    def _group(self, name: str, rank: int) -> tuple[int, ...]:
        lay, at = self.layout, self.coordinates(rank)
        row = at["dp"] * lay.cp + at["cp"]
        pp, rows, tp = range(at["pp"], at["pp"] + 1), range(row, row + 1), range(at["tp"], at["tp"] + 1)
        match name:
            case "pp":
                pp = range(lay.pp)
            case "tp":
                tp = range(lay.tp)
            case "cp":
                rows = range(at["dp"] * lay.cp, (at["dp"] + 1) * lay.cp)
            case "dp":
                rows = range(at["cp"], lay.dp * lay.cp, lay.cp)
            case "ep":  # neighbours in (dp, cp): experts fold over both
                rows = range(at["edp"] * lay.ep, (at["edp"] + 1) * lay.ep)
            case "sequence":  # who share one sequence's tokens
                rows, tp = range(at["dp"] * lay.cp, (at["dp"] + 1) * lay.cp), range(lay.tp)
            case "stage":
                rows, tp = range(lay.dp * lay.cp), range(lay.tp)
            case "world":
                pp, rows, tp = range(lay.pp), range(lay.dp * lay.cp), range(lay.tp)
            case _:
                raise ValueError(f"no group named {name}")
        return self.ranks(pp, rows, tp)

    def size(self, name: str) -> int:
        """How many ranks a group `name` has (the same for every rank)."""
        lay = self.layout
        match name:
            case "world":
                return lay.world
            case "sequence":
                return lay.cp * lay.tp
            case "stage":
                return lay.dp * lay.cp * lay.tp
            case _:
                return getattr(lay, name)

    def neighbour(self, rank: int, stage: int) -> int:
        """The rank on pipeline coordinate `stage` with the same dp, cp and tp as `rank`."""
        return self.group("pp", rank)[stage]

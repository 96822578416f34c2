"""Ranks and coordinates: who sits where, and which ranks form a group. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penteract.spec.layout import Layout

AXES = ("pp", "dp", "cp", "tp")  # outermost first: tensor ranks are neighbours

# A group's name -> the coordinates that are the same for all of its members.
_FIXED: dict[str, tuple[str, ...]] = {
    "world": (),
    "dp": ("pp", "cp", "tp"),
    "tp": ("pp", "dp", "cp"),
    "cp": ("pp", "dp", "tp"),
    "pp": ("dp", "cp", "tp"),
    "ep": ("pp", "edp", "tp"),
    "sequence": ("pp", "dp"),  # the ranks that share one sequence's tokens
    "stage": ("pp",),
}


@dataclass(frozen=True)
class Mesh:
    """The grid of one layout. Group members are listed in rank order, which is their order on the wire."""

    layout: Layout

    def coordinates(self, rank: int) -> dict[str, int]:
        """rank -> {pp, dp, cp, tp, ep, edp}; (dp, cp) read as one number splits into (edp, ep)."""
        at, rest = dict[str, int](), rank
        for axis in reversed(AXES):
            rest, at[axis] = divmod(rest, int(getattr(self.layout, axis)))
        at["edp"], at["ep"] = divmod(at["dp"] * self.layout.cp + at["cp"], self.layout.ep)
        return at

    @cached_property
    def _all(self) -> list[dict[str, int]]:
        return [self.coordinates(r) for r in range(self.layout.world)]

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group `name`, ascending."""
        fixed, me = _FIXED[name], self._all[rank]
        return tuple(r for r, at in enumerate(self._all) if all(at[a] == me[a] for a in fixed))

    def size(self, name: str) -> int:
        """How many ranks a group `name` has (the same for every rank)."""
        lay = self.layout
        return {"world": lay.world, "sequence": lay.cp * lay.tp, "stage": lay.dp * lay.cp * lay.tp}.get(
            name
        ) or getattr(lay, name)

    def neighbour(self, rank: int, stage: int) -> int:
        """The rank on pipeline coordinate `stage` with the same dp, cp and tp as `rank`."""
        return self.group("pp", rank)[stage]

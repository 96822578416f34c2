"""Process groups: made once for each set of ranks, in the same order everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from penteract.ops.params import holders
from penteract.parallel.data import shard_groups
from penteract.parallel.matrix import peers
from penteract.spec.mesh import Mesh
from penteract.step.program import Program

Ranks = tuple[int, ...]

NAMES = ("world", "dp", "tp", "cp", "pp", "ep", "sequence", "stage")


@dataclass(slots=True)
class Groups:
    """Ranks -> process group. Creating one is collective: all ranks of the world ask for the same, in one order."""

    made: dict[Ranks, Any] = field(default_factory=dict[Ranks, Any])

    def make(self, wanted: Iterable[Ranks]) -> None:
        for ranks in sorted(set(wanted)):
            if len(ranks) > 1 and ranks not in self.made:
                self.made[ranks] = dist.new_group(list(ranks))

    def connect(self, rank: int, device: torch.device) -> None:
        """On GPUs: set up every line of this rank now, all ranks in one order.

        A group connects when it is first used, and its host waits for the others' then: in the middle of a step that
        wait, crossed with another rank's, can be for ever.
        """
        if device.type == "cuda":
            for ranks in sorted(self.made):
                if rank in ranks:
                    dist.all_reduce(torch.zeros(1, device=device), group=self.made[ranks])
            torch.cuda.synchronize()

    def __getitem__(self, ranks: Ranks) -> Any:
        return self.made[ranks]


def needed(p: Program) -> set[Ranks]:
    """Every group that some rank of the layout uses."""
    mesh: Mesh = p.mesh
    world = range(p.layout.world)
    wanted = {mesh.group(name, r) for name in NAMES for r in world}
    # A group of holders is decided by what is cut and where it lives: one look at each kind is enough.
    kinds = {(q.cut(mesh), p.homes[q.name], q.matrix): q for q in p.everything}
    for (_, home, _), q in kinds.items():
        for r in world:
            if mesh.coordinates(r)["pp"] in home:
                wanted |= {*shard_groups(holders(q, home, mesh, r), p.layout, r)}
                wanted |= {peers((q,), mesh, r)} if q.matrix else set[Ranks]()
    return wanted

"""Process groups: one of this rank in each round, made in the same order everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from penteract.config.mesh import AXES
from penteract.engine.comm.comm import Ranks
from penteract.ops.params import Param, reduce_ranks
from penteract.parallel.data import shard_groups
from penteract.parallel.matrix import peers
from penteract.schedule.actions import Payload
from penteract.step.program import Program

# The pipeline's messages have lines of their own, one for each of what they carry: values go on, gradients back, so one
# way waits for no message of the other.
Channel = Payload | Literal[""]
CHANNELS: tuple[Payload, ...] = ("value", "gradient")


class Round(NamedTuple):
    """Groups that share no rank, which all ranks know: each makes its own."""

    groups: tuple[Ranks, ...]
    channel: Channel = ""


@dataclass(slots=True)
class ProcessGroups:
    """(ranks, channel) -> process group, of those that this rank is in; `known`: those of all ranks.

    Without local synchronisation `new_group` asks every rank of the world for every group, over a thousand of them at
    4096 ranks. With it, members alone come, and find each other by a name: their ranks, and how many groups a process
    has. So each rank makes one in each round, alone if it must be, and counts stay equal everywhere. Rounds come in one
    order and groups of one share no rank, so a rank that waits for members waits for an earlier round or its own: no
    cycle. `split_group` would need a backend that is bound to a device, and gloo has none.
    """

    backend: str | None = None  # of the groups; the world's where none is said
    made: dict[tuple[Ranks, Channel], Any] = field(default_factory=dict[tuple[Ranks, Channel], Any])
    known: set[tuple[Ranks, Channel]] = field(default_factory=set[tuple[Ranks, Channel]])

    def make(self, rounds: Iterable[Round]) -> None:
        """By all ranks of the world, with the same rounds."""
        for groups, channel in rounds:
            fresh = [g for g in groups if len(g) > 1 and (g, channel) not in self.known]
            self.known |= {(g, channel) for g in fresh}
            if not fresh:
                continue
            me = dist.get_rank()
            own = next((g for g in fresh if me in g), (me,))
            if len(own) == dist.get_world_size() and not channel:
                self.made[own, channel] = dist.group.WORLD
                continue
            group = dist.new_group(list(own), backend=self.backend, use_local_synchronization=True)
            if len(own) > 1:
                self.made[own, channel] = group

    def __getitem__(self, ranks: Ranks) -> Any:
        return self.made[ranks, ""]

    def of(self, ranks: Ranks, channel: Channel) -> Any:
        """The process group of these ranks for one channel of messages. KeyError unless `make` made it."""
        return self.made[ranks, channel]


def needed(p: Program) -> list[Round]:
    """The groups of all ranks of a layout, the same list on each of them."""
    mesh, lay = p.mesh, p.layout
    rounds = [Round(_groups(lay.world, lambda r, name=name: mesh.group(name, r))) for name in axes(p)]
    if lay.pp > 1:
        lines = _groups(lay.world, lambda r: mesh.group("pp", r))
        rounds += [Round(lines, what) for what in CHANNELS]
    # A reduce group is decided by what is cut and where it lives: one look at each kind is enough. What lives on
    # one stage is cut alike on all of them.
    kinds = {
        (q.cut(mesh), q.matrix, p.owning_stages[q.name] if len(p.owning_stages[q.name]) > 1 else ()): q
        for q in p.everything
    }
    for (_, matrix, several), q in kinds.items():
        first = mesh.group("pp", 0)[several[0] if several else 0]
        for i, some in enumerate(_holding(p, q, several, first)):
            if len(some) > 1:
                rounds.append(Round(_groups(lay.world, lambda r, i=i, q=q, s=several: _holding(p, q, s, r)[i])))
        if matrix:
            rounds.append(Round(_groups(lay.world, lambda r, q=q: peers((q,), mesh, r))))
    return rounds


def _holding(p: Program, q: Param, several: tuple[int, ...], rank: int) -> tuple[Ranks, Ranks]:
    """Who share a parameter of this kind with a rank, and who have the same shard; itself where it has none."""
    here = p.mesh.coordinates(rank)["pp"]
    owning_stages = several or (here,)
    return (
        shard_groups(reduce_ranks(q.cut(p.mesh), owning_stages, p.mesh, rank), p.layout, rank)
        if here in owning_stages
        else ((rank,), (rank,))
    )


def axes(p: Program) -> Iterator[str]:
    """The axes over which some rank of a layout talks."""
    lay, moe, fp8 = p.layout, p.model.moe, p.precision.fp8
    yield "world"
    yield "dp"
    yield from (name for name, axis in AXES.items() if axis.crosses and axis.size(lay) > 1)
    if moe is not None or fp8 is not None:
        yield "sequence"
    if (moe is not None and moe.balance == "bias") or (fp8 is not None and (fp8.kind == "delayed" or fp8.gather)):
        yield "stage"


def _groups(world: int, of: Callable[[int], Ranks]) -> tuple[Ranks, ...]:
    """Each group once, of those that `of` tells of each rank."""
    seen, out = set[int](), list[Ranks]()
    for r in range(world):
        if r not in seen:
            out.append(of(r))
            seen.update(out[-1])
    return tuple(out)

"""Process groups: this rank makes one in each round; all ranks go through the rounds in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penteract.config.mesh import AXES
from penteract.engine.comm.comm import Channel, Ranks, Round
from penteract.ops.params import Param, reduce_ranks
from penteract.parallel import direct
from penteract.parallel.data import shard_groups
from penteract.parallel.matrix import peers
from penteract.schedule.actions import Payload
from penteract.step.program import Program

CHANNELS: tuple[Payload, ...] = ("value", "gradient")


def abort_groups() -> None:
    """Tear down all process groups of this rank: ends NCCL's blocked collectives, but not gloo's."""
    abort: Callable[[], None] | None = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized():
        with suppress(Exception):
            abort()


@dataclass(slots=True)
class ProcessGroups:
    """`made`: (ranks, channel) -> process group, for the groups of this rank; `all_made`: the keys of all ranks'
    groups.

    Without local synchronisation every rank of the world must call `new_group` for every group: over a thousand calls
    at 4096 ranks. With it only members call, and find each other by a name made of their ranks and the number of groups
    that the process has. So each rank makes one group in each round, if need be of itself alone, and the numbers stay
    equal on all ranks. Rounds have a fixed order and disjoint groups, so a rank only waits for members in an earlier or
    the same round: there is no cycle. `split_group` would need a backend bound to a device, which gloo is not.
    """

    backend: str | None = None  # of the groups; None: the world's
    timeout: timedelta | None = None  # after which torch ends a collective; None: torch's own
    made: dict[tuple[Ranks, Channel], Any] = field(default_factory=dict[tuple[Ranks, Channel], Any])
    all_made: set[tuple[Ranks, Channel]] = field(default_factory=set[tuple[Ranks, Channel]])

    def make(self, rounds: Iterable[Round]) -> None:
        """Make the groups of these rounds that are new. Called by all ranks of the world with the same rounds."""
        for own, channel in self.own_groups(rounds, dist.get_rank):
            if len(own) == dist.get_world_size() and not channel:
                self.made[own, channel] = dist.group.WORLD
                continue
            how = {"timeout": self.timeout, "backend": self.backend}
            group = dist.new_group(list(own), use_local_synchronization=True, **how)
            if len(own) > 1:
                self.made[own, channel] = group

    def own_groups(self, rounds: Iterable[Round], me: Callable[[], int]) -> Iterator[tuple[Ranks, Channel]]:
        """The group that rank `me` makes in each round that has a new one; of one rank where it is in none. A run
        of one rank has no number to ask for."""
        for groups, channel in rounds:
            new = [g for g in groups if len(g) > 1 and (g, channel) not in self.all_made]
            self.all_made |= {(g, channel) for g in new}
            if new:
                rank = me()
                yield next((g for g in new if rank in g), (rank,)), channel

    def __getitem__(self, ranks: Ranks) -> Any:
        return self.made[ranks, ""]

    def of(self, ranks: Ranks, channel: Channel) -> Any:
        """The process group of these ranks for one channel of messages. KeyError unless `make` made it."""
        return self.made[ranks, channel]


def needed(p: Program) -> list[Round]:
    """The groups of all ranks of a layout. The list is the same on each rank."""
    mesh, lay = p.mesh, p.layout
    rounds = [Round(_groups(lay.world, lambda r, name=name: mesh.group(name, r))) for name in axes(p)]
    if lay.pp > 1:
        pipelines = _groups(lay.world, lambda r: mesh.group("pp", r))
        rounds += [Round(pipelines, what) for what in CHANNELS]
    # Reduce groups depend only on how a parameter is sharded and on the pipeline ranks that hold it, so one of each
    # kind is enough. Parameters of one pipeline rank have the same groups on every one.
    kinds = {
        (q.cut(mesh), q.matrix, p.owning_pp_ranks[q.name] if len(p.owning_pp_ranks[q.name]) > 1 else ()): q
        for q in p.everything
    }
    for (_, matrix, several), q in kinds.items():
        first = mesh.group("pp", 0)[several[0] if several else 0]
        for i, ranks in enumerate(_parameter_groups(p, q, several, first)):
            if len(ranks) > 1:
                rounds.append(
                    Round(_groups(lay.world, lambda r, i=i, q=q, s=several: _parameter_groups(p, q, s, r)[i]))
                )
        if matrix:
            rounds.append(Round(_groups(lay.world, lambda r, q=q: peers((q,), mesh, r))))
    return rounds


def direct_rounds(p: Program, per_host: int) -> list[Round]:
    """The groups whose ranks, all on one host, read each other's registers: of each axis a round of
    their own. `per_host`: ranks of a host; 0: not known, so there are none."""
    mesh, rounds = p.mesh, list[Round]()
    for axis in direct.axes(p.layout):
        groups = _groups(p.layout.world, lambda r, axis=axis: mesh.group(axis, r))
        near = tuple(g for g in groups if per_host and len(g) > 1 and len({r // per_host for r in g}) == 1)
        if near:
            rounds.append(Round(near, "direct"))
    return rounds


def _parameter_groups(p: Program, q: Param, several: tuple[int, ...], rank: int) -> tuple[Ranks, Ranks]:
    """(shard group, replicate group) of a rank for parameters of this kind; itself alone if it has none. `several`: the
    pipeline ranks that hold it, if there are more than one."""
    here = p.mesh.coordinates(rank)["pp"]
    owning_pp_ranks = several or (here,)
    return (
        shard_groups(reduce_ranks(q.cut(p.mesh), owning_pp_ranks, p.mesh, rank), p.layout, rank)
        if here in owning_pp_ranks
        else ((rank,), (rank,))
    )


def axes(p: Program) -> Iterator[str]:
    """The axes over which ranks of a layout communicate."""
    lay, moe, fp8 = p.layout, p.model.moe, p.precision.fp8
    yield "world"
    yield "dp"
    yield from (name for name, axis in AXES.items() if axis.crosses and axis.size(lay) > 1)
    if moe is not None or fp8 is not None:
        yield "sequence"
    if (moe is not None and moe.balance == "bias") or (fp8 is not None and (fp8.kind == "delayed" or fp8.gather)):
        yield "dp_cp_tp"


def _groups(world: int, of: Callable[[int], Ranks]) -> tuple[Ranks, ...]:
    """Each group once; `of(rank)` is the group of a rank."""
    grouped, out = set[int](), list[Ranks]()
    for r in range(world):
        if r not in grouped:
            out.append(of(r))
            grouped.update(out[-1])
    return tuple(out)

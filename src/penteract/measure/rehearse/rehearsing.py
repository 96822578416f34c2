"""Rehearse a run: one rank or a rank of every kind, and the ranks that they are held against."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from penteract.config.device_words import of_cpu
from penteract.config.hardware import HEADROOM, Cluster
from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.config.rules.kernel_limits import FA4, QUACK
from penteract.config.rules.legal import check_legal
from penteract.config.run import RunSpec
from penteract.engine.kernels.registry import TargetElsewhere
from penteract.errors import BadInput
from penteract.measure.rehearse.checks.partners import unmatched
from penteract.measure.rehearse.findings import Fault
from penteract.measure.rehearse.rank_kinds import corners, peers
from penteract.measure.rehearse.rank_rehearsal import RankRehearsal, rehearse_rank
from penteract.measure.rehearse.smaller import smaller_runs
from penteract.measure.rehearse.wires import RehearsedWire
from penteract.measure.schemas.rehearsal import (
    Allocations,
    CheckpointFile,
    KernelCalls,
    OwnerBytes,
    ProcessGroup,
    Rehearsal,
    RehearsalMismatch,
    RehearsedRank,
    TimelinePoint,
    WireCalls,
)
from penteract.model.count import parameters
from penteract.planner.ask import as_text

Progress = Callable[[int, int], None]  # ranks that are done, and all


def rehearse_run(
    spec: RunSpec,
    rank: int = 0,
    cluster: Cluster | None = None,
    *,
    every_kind: bool = False,
    headroom: float = HEADROOM,
    progress: Progress | None = None,
) -> Rehearsal:
    """Rehearse `rank` of a run, or with `every_kind` a rank of each kind, held against each other and their neighbours.

    `cluster`: whose GPUs it is for; without one their memory is not known, and they are of Hopper's kind. `headroom`:
    share of that memory kept free of tensors. Raises BadInput where the run's own start would, and for a rank that it
    lacks.
    """
    began, lay = time.process_time(), spec.layout
    check_legal(spec.model, lay, spec.sequence_length)
    if not 0 <= rank < lay.world:
        raise BadInput("RANK", "the run has no such rank", where="--rank", found=rank, allowed=f"0 to {lay.world - 1}",
                       fix=f"--rank {lay.world - 1}, or a layout of more ranks")  # fmt: skip
    if cluster is not None and cluster.gpus != lay.world:
        raise BadInput("RANKS", "a rank has a GPU of its own", where="--gpus", found=f"{cluster.gpus} GPUs",
                       allowed=f"{lay.world}, as the layout has ranks",
                       fix="another --gpus, or other degrees")  # fmt: skip
    target = target_of(spec, cluster)
    chosen = corners(spec.model, lay) if every_kind else {rank: ""}
    against = {} if every_kind else {r: axis for r, axis in peers(lay, rank).items() if r not in chosen}
    all_of_them, done = len(chosen) + len(against), list[RankRehearsal]()
    for number, steps in (*((r, 2) for r in chosen), *((r, 1) for r in against)):
        if progress is not None:
            progress(len(done), all_of_them)
        done.append(rehearse_rank(spec, number, target, steps=steps))
    faults = [fault for one in done for fault in one.faults]
    if not any(one.stopped for one in done):
        faults += unmatched(done)
    usable = cluster.usable(headroom) or None if cluster is not None else None
    made = tuple(_public(one, lay, chosen[one.rank], usable) for one in done if one.rank in chosen)
    too_large = usable is not None and any(one.peak > usable for one in made)
    return Rehearsal(
        model=spec.model.name, parameters=parameters(spec.model).total,
        layout=as_text(lay, usual=lay), world=lay.world,
        precision=spec.precision.dtype, sequence_length=spec.sequence_length, device=target.name,
        usable=usable, ranks=made, held_against={str(r): axis for r, axis in against.items()},
        mismatches=_mismatches(faults),
        smaller=smaller_runs(spec, cluster, usable) if too_large and cluster is not None and usable is not None else (),
        assumed=_assumed(lay, target), cpu_seconds=time.process_time() - began,
    )  # fmt: skip


def target_of(spec: RunSpec, cluster: Cluster | None) -> TargetElsewhere:
    """The device of a run: a cluster's GPU; without one, what its file names, or what its kernels are for."""
    if cluster is not None and cluster.gpu is not None and not of_cpu(cluster):
        return TargetElsewhere("cuda", cluster.gpu.name, cluster.gpu.capability)
    device, lay = spec.precision.device, spec.layout
    for_gpus = lay.elementwise != "reference" or lay.attention != "reference" or lay.experts == "quack"
    if device == "cuda" or (device == "auto" and for_gpus):
        return TargetElsewhere("cuda", "cuda")
    return TargetElsewhere("cpu", "cpu", (0, 0))


def _assumed(lay: Layout, target: TargetElsewhere) -> tuple[str, ...]:
    """What a start on the ranks' hosts looks for, and a rehearsal does not."""
    wanted = {"fa4": FA4, "fa4_documents": FA4}.get(lay.attention), QUACK if lay.experts == "quack" else None
    packages = tuple(f"{name} {version}" for name, version in filter(None, wanted))
    return (f"compute capability {'.'.join(map(str, target.capability))}",) * (target.name == "cuda") + packages


def _mismatches(faults: Iterable[Fault]) -> tuple[RehearsalMismatch, ...]:
    """One of several ranks with the same fault."""
    seen = {(f.code, f.what): f for f in reversed(list(faults))}
    return tuple(RehearsalMismatch(**f._asdict()) for f in reversed(seen.values()))


def _public(one: RankRehearsal, lay: Layout, kind: str, usable: int | None) -> RehearsedRank:
    mesh = Mesh(lay)
    return RehearsedRank(
        rank=one.rank, kind=kind, at=one.at, resident=one.resident, peak=one.peak,
        fits=None if usable is None else one.peak <= usable,
        owners=tuple(
            OwnerBytes(
                owner=o.name, most=o.most, at_peak=o.at_peak, priced=None if o.priced < 0 else o.priced, why=o.why
            )
            for o in one.owners
        ),
        timeline=tuple(TimelinePoint(action=m.what, alive=m.now, most=m.most, host=m.host) for m in one.timeline),
        wires=_wires(one, mesh),
        groups=tuple(
            ProcessGroup(**_about(mesh, one.rank, ranks)._asdict(), channel=channel) for ranks, channel in one.groups
        ),
        kernels=tuple(
            KernelCalls(**kind._asdict(), calls=calls, workspace=one.workspaces[kind])
            for kind, calls in one.kernels.items()
        ),
        allocations=tuple(
            Allocations(owner=owner, bytes=size, count=n) for (owner, size), n in sorted(one.allocations.items())
        ),
        checkpoint=tuple(CheckpointFile(**file._asdict()) for file in one.checkpoint),
    )  # fmt: skip


def _wires(one: RankRehearsal, mesh: Mesh) -> tuple[WireCalls, ...]:
    """Those of a steady step, equal ones together."""
    counts, by = Counter[RehearsedWire](), dict[RehearsedWire, str]()
    for number in one.steady:
        wire = one.wires[number]
        key = wire._replace(at="")
        counts[key] += 1
        by.setdefault(key, wire.at)
    made = list[WireCalls]()
    for key, calls in counts.items():
        about = _about(mesh, one.rank, key.ranks) if key.ranks else GroupShape("host", 0, one.rank, 0)
        if key.channel:
            about = about._replace(axis="cp" if key.channel == "shift" else "pp")
        made.append(
            WireCalls(kind=key.kind, bytes=key.bytes, dtype=key.dtype, calls=calls, by=by[key], **about._asdict())
        )
    return tuple(made)


class GroupShape(NamedTuple):
    """A group in few words: every `step`-th of `ranks` ranks from `first` on; 0: uneven."""

    axis: str
    ranks: int
    first: int
    step: int


def _about(mesh: Mesh, rank: int, ranks: tuple[int, ...]) -> GroupShape:
    axis = next((name for name in AXES if mesh.group(name, rank) == ranks), "parameters")
    steps = {b - a for a, b in pairwise(ranks)}
    return GroupShape(axis, len(ranks), ranks[0], steps.pop() if len(steps) == 1 else 0)

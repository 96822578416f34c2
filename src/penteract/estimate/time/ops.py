"""From what a rank does to the clock's ops: calls of a piece, what happens to a bucket, sums outside of the tape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penteract.estimate.pieces import Piece
from penteract.estimate.rates import Span
from penteract.estimate.time.clock import BESIDE, FIRST, IN, LOOK, OUT, PART, RUN, START, WAIT, Key, Op, ps
from penteract.estimate.time.cost import DIMENSION, BucketCosts, Device
from penteract.ops.offload import COPIES
from penteract.ops.tape import Phase, Site
from penteract.parallel.data import Bucket
from penteract.spec.mesh import Mesh
from penteract.step.agreements import Agreement

Positions = tuple[tuple[Op, ...], ...]  # ops of each instruction of an action
DATA, UPDATE, HOST = PART["data"], PART["update"], PART["host"]


@dataclass(slots=True)
class Streams:
    """The streams of one rank: one for each set of ranks that it talks to, whatever the group is called."""

    mesh: Mesh
    rank: int
    by_ranks: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    parts: list[int] = field(default_factory=lambda: [DATA, HOST, HOST])

    def of(self, ranks: tuple[int, ...], part: int) -> int:
        """`part`: of a step, that waiting for it is; where groups coincide, the first one's."""
        if ranks not in self.by_ranks:
            self.by_ranks[ranks] = FIRST + len(self.by_ranks)
            self.parts.append(part)
        return self.by_ranks[ranks]

    def axis(self, axis: str) -> int:
        """Of an axis along which the tape talks."""
        return self.of(self.mesh.group(axis, self.rank), PART[DIMENSION.get(axis, "update")])


def piece_ops(piece: Piece, device: Device, streams: Streams) -> Mapping[str, Positions]:
    """Of each action of a piece, the ops of its instructions."""
    return {
        name: tuple([_call(piece, device, streams, *piece.outline.jobs[job], ins, outs) for job, ins, outs in calls])
        for name, calls in piece.outline.calls.items()
    }


def _call(
    piece: Piece, device: Device, streams: Streams, place: int, phase: Phase, ins: Sequence[int], outs: Sequence[int]
) -> tuple[Op, ...]:  # fmt: skip
    site = piece.sites[place]
    name = f"{phase} {site}"
    if phase == "finish":
        return ((WAIT, ("c", 0, ins[-1]), _part(site), name),)
    if phase == "start":
        stream = (
            (OUT if site.word == COPIES[0] else IN) if site.word in COPIES else streams.axis(str(site.attrs["axis"]))
        )
        return ((START, stream, ps(device.collective(site)), ("c", 0, outs[0]), name),)
    part, seconds = device.call(site, phase, piece.specs, (*ins, *outs))
    run: Op = (RUN, ps(seconds), PART[part], name)
    if site.word == "split_sizes":
        return (run, (LOOK, name))
    if (asked := device.agreement(site, phase)) is not None:
        axis, took = asked
        part = "tensor" if axis == "sequence" else DIMENSION[axis]
        key: Key = ("a", 0, 0)
        return ((START, streams.axis(axis), ps(took), key, f"largest {name}"), (WAIT, key, PART[part], name), run)
    return (run,)


def _part(site: Site) -> int:
    return HOST if site.word in COPIES else PART[DIMENSION[str(site.attrs["axis"])]]


@dataclass(slots=True)
class BucketOps:
    """What happens to the buckets of one rank. Keys tell collectives under way apart."""

    buckets: Sequence[Bucket]
    costs: BucketCosts
    streams: Streams
    known: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def _took(self, what: str, b: Bucket) -> int:
        key = what, id(b)
        if key not in self.known:
            seconds = getattr(self.costs, what)(b) if what not in _WIRES else self.costs.on_wire(what, b)
            self.known[key] = ps(seconds)
        return self.known[key]

    def _stream(self, ranks: tuple[int, ...]) -> int:
        return self.streams.of(ranks, DATA)

    def gather(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Shards of parameters to all who share the bucket; as codes of FP8 where they travel so."""
        if b.gathered_as == "code":
            yield RUN, self._took("coded", b), DATA, "code"
        yield START, self._stream(b.sharers), self._took("all_gather", b), key, "all_gather parameters"

    def reduce(self, b: Bucket, key: Key) -> Iterator[Op]:
        """The sum of its gradients: to each who shares it its own shard, or all of it."""
        if len(b.holders) == 1:
            return
        if took := self._took("narrowed", b):
            yield RUN, took, DATA, "narrow gradients"
        kind, ranks = ("reduce_scatter", b.sharers) if b.shards > 1 else ("all_reduce", b.replicas)
        yield START, self._stream(ranks), self._took(kind, b), key, f"{kind} gradients"

    def replicate(self, b: Bucket, waited: Key, key: Key) -> Iterator[Op]:
        """The sum of a shard's gradients over its replicas."""
        yield BESIDE, waited, self._stream(b.replicas), self._took("all_reduce", b), key, "all_reduce shards"

    def land(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Wait for a sum of gradients that are cut, and add it to the shard's."""
        if len(b.holders) > 1:
            yield WAIT, key, DATA, "wait gradients"
        yield RUN, self._took("landed", b), DATA, "add gradients"

    def widen(self, b: Bucket, key: Key) -> Iterator[Op]:
        """Wait for a sum, and put it in the dtype of gradients."""
        yield WAIT, key, DATA, "wait gradients"
        if took := self._took("narrowed", b):
            yield RUN, took, DATA, "widen gradients"

    def measure(self, b: Bucket) -> Op:
        """The squares of this rank's gradients."""
        return RUN, self._took("squares", b), UPDATE, "squares"

    def update(self, bucket: int) -> Iterator[Op]:
        """Move this rank's shard."""
        b = self.buckets[bucket]
        yield RUN, self._took("update", b), UPDATE, "update"
        if b.mover.by_matrix:
            yield from self._matrices(b)

    def _matrices(self, b: Bucket) -> Iterator[Op]:
        """Make a bucket's matrices whole, this rank's own orthogonal, and sum them; all wait for the rank whose own
        take longest."""
        own, slowest = self.costs.hands(b, self.streams.rank)
        for i, (kind, ranks, seconds) in enumerate(own.wires):
            if i == len(own.wires) - 1:
                yield RUN, ps(own.seconds), UPDATE, "orthogonalise"
                seconds += max(0.0, slowest - own.seconds)
            yield from self._at_once(kind, ranks, ps(seconds), "matrices")
        if not own.wires:
            yield RUN, ps(own.seconds), UPDATE, "orthogonalise"

    def end(self) -> Iterator[Op]:
        """After the last update."""
        yield from ()

    def agree(self, a: Agreement) -> tuple[Op, ...]:
        """A few numbers reduced over ranks, and waited for."""
        ranks = self.streams.mesh.group(a.axis, self.streams.rank)
        if len(ranks) == 1:
            return ()
        took = self.costs.rates.collective("all_reduce", Span.of(ranks, self.costs.gpus_per_node), a.size)
        return self._at_once("all_reduce", ranks, ps(took), a.name)

    def _at_once(self, kind: str, ranks: tuple[int, ...], took: int, name: str) -> tuple[Op, ...]:
        """A collective that nothing is done beside."""
        key: Key = ("b", 0, 0)
        return (START, self.streams.of(ranks, UPDATE), took, key, f"{kind} {name}"), (WAIT, key, UPDATE, name)

    def largest(self, b: Bucket) -> Op:
        """The largest values of a shard's weights, which codes are scaled by."""
        return RUN, self._took("largest", b), DATA, "largest weights"


_WIRES = ("all_gather", "reduce_scatter", "all_reduce")

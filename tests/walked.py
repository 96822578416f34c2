"""What a rank does in order, read off its program: the walk answered with what `observed_calls` would see.

This is the order that a clock must tell, written down apart from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from observed_calls import Seen
from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.ops.collectives import payload
from penteract.ops.declarations import declaration_of
from penteract.ops.declarations.declaration import FLOAT
from penteract.ops.offload import OFFLOAD_OPS
from penteract.ops.spec import Spec, size
from penteract.ops.tape import Call
from penteract.parallel.data import Bucket
from penteract.readings.layers.expert_load import Load, Recorded
from penteract.schedule.actions import Transfer
from penteract.step import muon
from penteract.step.all_reduces import StepAllReduce
from penteract.step.program import BufferKey, Program
from penteract.step.update import staging_buffers
from penteract.step.walk import Silent, walk


def expected(p: Program, received: Mapping[tuple[int, int], int], *, counted: bool = True) -> list[Seen]:
    """What a rank does in one step with an update, in order. `received`: what routing decided."""
    reading = Walked(p, Recorded(received))
    walk(p, reading, targets_counted=counted)
    return reading.seen


class Walked(Silent):
    def __init__(self, p: Program, load: Load) -> None:
        self.p, self.load = p, load
        self.seen: list[Seen] = []
        self.started = 0
        self.stream = "compute"
        self.flights: dict[object, int] = {}  # what is under way, by what it is of -> its number
        self.sends: list[int] = []
        self.written: set[int] = set()
        self.passing = _Passing(self) if p.layout.offload_optimizer else None

    def add(self, what: str, name: str = "", **more: object) -> None:
        self.seen.append(Seen(what, name, stream=self.stream, **more))  # type: ignore[arg-type]

    def start(self, what: str, name: str = "", **more: object) -> int:
        self.add(what, name, number=self.started, **more)
        self.started += 1
        return self.started - 1

    def wait(self, number: int | None) -> None:
        if number is not None:
            self.add("wait", number=number)

    def at_once(self, kind: str, ranks: Sequence[int], amount: int) -> None:
        """A collective that nothing is done beside."""
        if len(ranks) > 1:
            self.wait(self.start("start", kind, ranks=tuple(ranks), bytes=amount))

    # ---- calls ---------------------------------------------------------------------------------------------------

    def all_reduce(self, reduction: StepAllReduce) -> None:
        self.at_once("all_reduce", self.p.mesh.group(reduction.axis, self.p.rank), reduction.size)

    def call(self, buffer: BufferKey, call: Call) -> None:
        site = call.site
        if call.phase == "finish":
            self.wait(self.flights.pop((buffer, call.ins[-1])))
        elif call.phase == "start":
            self.flights[buffer, call.outs[0]] = self._started(buffer, call)
        else:
            for _ in range(2 if call.rows == "others" and self._is_between() else 1):
                self.add("kernel", site.op_name, phase=call.phase, line=site.line)
            ins = [tuple(self._size(d, buffer) for d in s.shape) for s in site.ins]
            axis, n = declaration_of(site, self.p.layout).all_reduced_max(call.phase, ins, site.weights, site.attrs)
            if n:
                self.at_once("all_reduce", self.p.mesh.group(axis, self.p.rank), n * FLOAT)

    def _is_between(self) -> bool:
        """Whether the rows of other tensor ranks are before and after those of this one."""
        group = self.p.mesh.group("tp", self.p.rank)
        return self.p.rank not in (group[0], group[-1])

    def _started(self, buffer: BufferKey, call: Call) -> int:
        site = call.site
        if site.op_name in OFFLOAD_OPS:
            return self.start("copy", site.op_name, bytes=self._bytes(site.ins[0], buffer))
        group = self.p.mesh.group(str(site.attrs["axis"]), self.p.rank)
        amount = self._bytes(payload(site.op_name, site.ins[0], site.outs[0]), buffer)
        if site.op_name != "shift":
            return self.start("start", site.op_name, ranks=group, bytes=amount)
        me = group.index(self.p.rank)
        number = self.start("send", ranks=(group[(me + 1) % len(group)],), bytes=amount)
        self.add("recv", ranks=(group[me - 1],), bytes=amount, number=number)
        return number

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        for t, buffer, r in transfers:
            amount = self._bytes(self.p.chunks[buffer[0]].specs[r], buffer)
            number = self.start(
                t.kind.lower(), t.what, ranks=(self.p.mesh.neighbour(self.p.rank, t.peer),), bytes=amount
            )
            if t.kind == "Send":
                self.sends.append(number)
            else:
                self.flights[buffer, r] = number

    def wait_recv(self, buffer: BufferKey, register: int) -> None:
        self.wait(self.flights.pop((buffer, register)))

    def wait_sends(self) -> None:
        for number in self.sends:
            self.wait(number)
        self.sends.clear()

    # ---- buckets -------------------------------------------------------------------------------------------------

    def gather(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        if b.gathered_as == "fp8":
            for n in self._quantised(b):
                self.add("quantise", bytes=n * self.p.widths["parameter"])
        number = self.start("start", "all_gather", ranks=b.shard_ranks, bytes=b.size * self.p.widths[b.gathered_as])
        self.flights["gather", bucket] = number

    def _quantised(self, b: Bucket) -> Iterator[int]:
        """Elements that this rank's shard has of each weight that travels in FP8."""
        shard, names = b.shard(self.p.rank), {site.params[0] for site in self.p.quantised_weights}
        for q, at in zip(b.params, b.offsets, strict=True):
            n = min(at + q.numel(self.p.mesh), shard.stop) - max(at, shard.start)
            if n > 0 and q.name in names:
                yield n

    def wait_all_gather(self, bucket: int) -> None:
        self.wait(self.flights.pop(("gather", bucket), None))

    def reduce(self, bucket: int) -> None:
        b, widths = self.p.buckets[bucket], self.p.widths
        if b.summed:
            self._narrow(b.size)
            kind, ranks = ("reduce_scatter", b.shard_ranks) if b.shards > 1 else ("all_reduce", b.replicate_ranks)
            self.flights["sum", bucket] = self.start("start", kind, ranks=ranks, bytes=b.size * widths["reduce"])

    def wait_reduce_scatter(self, bucket: int) -> None:
        self.wait(self.flights.pop(("sum", bucket)))
        self.add("wait_reduce_scatter", "add" if bucket in self.written else "write", bucket=bucket)
        self.written.add(bucket)

    def replicate(self, bucket: int) -> None:
        b = self.p.buckets[bucket]
        self.stream = "waits"
        self.wait(self.flights.pop(("sum", bucket), None))
        if b.cut_gradients:
            self._narrow(b.shard_size)
        amount = b.shard_size * self.p.widths["reduce"]
        self.flights["sum", bucket] = self.start("start", "all_reduce", ranks=b.replicate_ranks, bytes=amount)
        self.stream = "compute"

    def widen(self, bucket: int) -> None:
        self.wait(self.flights.pop(("sum", bucket)))
        if self.p.precision.reduce != self.p.precision.gradient:
            self.add("widen", bytes=self.p.buckets[bucket].shard_size * self.p.widths["gradient"])

    def _narrow(self, elements: int) -> None:
        if self.p.precision.reduce != self.p.precision.gradient:
            self.add("narrow", bytes=elements * self.p.widths["gradient"])

    def measure(self, bucket: int) -> None:
        self.add("measure", bucket=bucket)

    def update(self, bucket: int) -> None:
        if self.passing is not None:
            self.passing.update(bucket)
            return
        b = self.p.buckets[bucket]
        self.moved(bucket, b.shard_size)
        if b.optimizer_kind.by_matrix:
            for kind, ranks, amount in muon.wires(b, muon.own(b, self.p.rank), self.p.precision):
                self.at_once(kind, ranks, amount)

    def moved(self, bucket: int, elements: int) -> None:
        self.add("update", bucket=bucket, bytes=elements * self.p.widths["gradient"])

    def end(self) -> None:
        if self.passing is not None:
            self.passing.settle()

    # ---- sizes ---------------------------------------------------------------------------------------------------

    def _size(self, dim: object, buffer: BufferKey) -> int:
        return size(dim, lambda layer: self.load.received(layer, buffer[1]))  # type: ignore[arg-type]

    def _bytes(self, spec: Spec, buffer: BufferKey) -> int:
        return prod(self._size(d, buffer) for d in spec.shape) * self.p.widths[spec.role]


class _Passing:
    """What the optimizer keeps on the host passes through the device: a slice comes while the one before it is moved,
    into the place of the one that left longest ago."""

    def __init__(self, walked: Walked) -> None:
        p = walked.p
        self.walked = walked
        self.staging = staging_buffers(((b, 1) for b in p.buckets), p.precision)
        every = ((i, self._slices(b)) for i, b in reversed([*enumerate(p.buckets)]))
        self.ahead = iter([(i, n) for i, some in every for n in some])
        self.coming: deque[list[int]] = deque()
        self.leaving: deque[list[int]] = deque()

    def _slices(self, b: Bucket) -> list[int]:
        """Elements of each."""
        whole, each = b.shard_size, self.staging.elements
        return [min(each, whole - at) for at in range(0, whole, each)]

    def update(self, bucket: int) -> None:
        if not self.coming:
            self._fetch()
        for n in self._slices(self.walked.p.buckets[bucket]):
            now = self.coming.popleft()
            self._fetch()
            self._wait(now)
            self.walked.moved(bucket, n)
            self.leaving.append(self._copies("to_host", bucket, n))

    def settle(self) -> None:
        while self.leaving:
            self._wait(self.leaving.popleft())

    def _fetch(self) -> None:
        if (item := next(self.ahead, None)) is not None:
            if len(self.leaving) == self.staging.count - 1 > 0:
                self._wait(self.leaving.popleft())
            self.coming.append(self._copies("from_host", *item))

    def _copies(self, way: str, bucket: int, n: int) -> list[int]:
        """Of a master, and of moments with their scales."""
        b, p = self.walked.p.buckets[bucket], self.walked.p.precision
        p = p.keeping(b.moments)
        each = [n * p.widths["master"]] * bool(p.master)
        each += [n * p.widths["moment"]] * len(b.optimizer_kind.moments)
        each += [n // MOMENT_BLOCK * FLOAT] * len(b.optimizer_kind.moments) * (p.moments == "int8")
        return [self.walked.start("copy", way, bytes=one) for one in each]

    def _wait(self, numbers: list[int]) -> None:
        for number in numbers:
            self.walked.wait(number)

"""The walk: the only place that orders a step. It calls a reading, which prices, runs or ignores each event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from penteract.ops.tape import Call
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Transfer
from penteract.step.all_reduces import OutsideTape, StepAllReduce, after_backward, at_begin, totals
from penteract.step.events import Around
from penteract.step.fsdp import Event
from penteract.step.program import BufferKey, Program

_QUIET = Around()


class Reading(Protocol):
    """The methods that the walk calls. Registers are in buffers, one for each pass (chunk, micro-batch)."""

    def begin(self) -> None:
        """The step begins; its data is in place."""

    def all_reduce(self, reduction: StepAllReduce) -> None:
        """All-reduce these numbers, and wait for the result."""

    def scales(self) -> None:
        """Set the scales of loss terms and of weights gathered in FP8 from the all-reduces before the first action."""

    def call(self, buffer: BufferKey, call: Call) -> None:
        """Run one call (a phase of an op, or start or finish of a collective) on registers of a buffer."""
        ...

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        """These registers are not read again: their storage may be reused."""
        ...

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        """Post sends and receives of registers in the given order. Registers to receive get storage here."""

    def wait_recv(self, buffer: BufferKey, register: int) -> None:
        """Wait until a posted receive has filled its register, right before the register is read."""

    def wait_sends(self) -> None:
        """Wait for all sends, right before the next ones are posted, so that compute never waits for a send earlier."""

    def wait_all_gather(self, bucket: int) -> None:
        """Wait for the all-gather of a bucket's parameters."""

    def acquire_gradient_buffer(self, bucket: int) -> None:
        """Give the unsharded gradients of a bucket a buffer for one action."""

    def reduce(self, bucket: int) -> None:
        """Start the reduction of a bucket's gradients: a reduce-scatter if it is sharded, else an all-reduce."""

    def wait_reduce_scatter(self, bucket: int) -> None:
        """Wait for the reduce-scatter of sharded gradients, and add the result to the shard's gradients."""

    def replicate(self, bucket: int) -> None:
        """Start the all-reduce of a shard's gradients over its replicas."""

    def after(self, action: Compute | Overlapped | P2PBatch) -> None:
        """An action and all its events are done."""
        ...

    def widen(self, bucket: int) -> None:
        """Wait for a bucket's last reduction, and convert it to the dtype that the update reads."""

    def measure(self, bucket: int) -> None:
        """Add up the squares of this rank's shard of a bucket's gradients."""

    def factors(self) -> None:
        """Compute from the totals what all updates share, and the number of targets of the next step."""

    def update(self, bucket: int) -> None:
        """Clip the gradients of this rank's shard of a bucket, and update its parameters."""

    def gather(self, bucket: int) -> None:
        """Start the all-gather of a bucket's parameters."""

    def end(self) -> None:
        """Update the routers' biases. Gathers still in flight are waited for at their next use."""


class Silent:
    """A reading that ignores everything: a base class for readings that need only some events."""

    __slots__ = ()

    def begin(self) -> None: ...
    def all_reduce(self, reduction: StepAllReduce) -> None: ...
    def scales(self) -> None: ...
    def call(self, buffer: BufferKey, call: Call) -> None: ...
    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None: ...
    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None: ...
    def wait_recv(self, buffer: BufferKey, register: int) -> None: ...
    def wait_sends(self) -> None: ...
    def wait_all_gather(self, bucket: int) -> None: ...
    def acquire_gradient_buffer(self, bucket: int) -> None: ...
    def reduce(self, bucket: int) -> None: ...
    def wait_reduce_scatter(self, bucket: int) -> None: ...
    def replicate(self, bucket: int) -> None: ...
    def after(self, action: Compute | Overlapped | P2PBatch) -> None: ...
    def widen(self, bucket: int) -> None: ...
    def measure(self, bucket: int) -> None: ...
    def factors(self) -> None: ...
    def update(self, bucket: int) -> None: ...
    def gather(self, bucket: int) -> None: ...
    def end(self) -> None: ...


def walk(p: Program, reading: Reading, *, targets_counted: bool = True) -> None:
    """One optimizer step of `p.rank`. `targets_counted`: the previous step has sent the number of targets; the
    first step counts them itself."""
    for question, *about in closing(p, _actions(p, reading, targets_counted=targets_counted)):
        getattr(reading, question)(*about)


def opening(p: OutsideTape, *, targets_counted: bool = True) -> Iterator[tuple[Any, ...]]:
    """What happens before the first action, in order: a method of `Reading`, and its arguments."""
    yield ("begin",)
    yield from (("all_reduce", reduction) for reduction in at_begin(p, targets_counted=targets_counted))
    yield ("scales",)


def closing(p: OutsideTape, summing: Iterable[int]) -> Iterator[tuple[Any, ...]]:
    """What happens after the last action. `summing`: buckets whose reduction is still in flight, in the order of their
    start."""
    yield from (("widen", b) for b in summing)
    yield from (("all_reduce", reduction) for reduction in after_backward(p))
    for b, bucket in enumerate(p.buckets):
        if bucket.replicate_ranks[0] == p.rank:  # one rank counts each element
            yield "measure", b
    yield "all_reduce", totals(p)
    yield ("factors",)
    for b, bucket in reversed(list(enumerate(p.buckets))):  # the next step uses the last ones first
        yield "update", b
        if bucket.gathered_after_update:
            yield "gather", b  # overlaps with the following updates and the next step's first actions
    yield ("end",)


def walk_forward(p: Program, reading: Reading) -> None:
    """The forward passes of a program compiled with `training=False`, and their losses."""
    _actions(p, reading, targets_counted=False)
    reading.all_reduce(totals(p))


def _actions(p: Program, reading: Reading, *, targets_counted: bool) -> list[int]:
    """The opening and all actions. -> the buckets whose reduction is still in flight, in the order of their start."""
    for question, *about in opening(p, targets_counted=targets_counted):
        getattr(reading, question)(*about)
    sent: list[tuple[BufferKey, int]] = []
    coming = set[tuple[BufferKey, int]]()
    flying: dict[int, None] = {}
    for a, action in enumerate(p.actions):
        if isinstance(action, P2PBatch):
            _wait_sends(reading, sent)
            sent = _post_p2p(p, action, reading, coming)
        else:
            for position, (buffer, instruction) in enumerate(p.instructions(action)):
                around = p.events.get((a, position), _QUIET)
                if around is not _QUIET:
                    _ask(p, reading, around.before, flying)
                for r in instruction.call.ins if coming else ():
                    if (buffer, r) in coming:
                        coming.remove((buffer, r))
                        reading.wait_recv(buffer, r)
                reading.call(buffer, instruction.call)
                reading.free(buffer, instruction.frees)
                if around is not _QUIET:
                    _ask(p, reading, around.after, flying)
        reading.after(action)
    _wait_sends(reading, sent)
    _ask(p, reading, p.events.get((len(p.actions), 0), _QUIET).before, flying)
    return list(flying)


def _ask(p: Program, reading: Reading, events: tuple[Event, ...], flying: dict[int, None]) -> None:
    """Call the reading for these events. `flying`: buckets whose reduction is in flight, in the order of their
    start."""
    for question, bucket in events:
        if question in ("reduce", "wait_reduce_scatter", "replicate"):
            flying.pop(bucket, None)
            if question != "wait_reduce_scatter" and p.buckets[bucket].summed:
                flying[bucket] = None
        match question:
            case "gather":
                reading.gather(bucket)
            case "wait_all_gather":
                reading.wait_all_gather(bucket)
            case "acquire_gradient_buffer":
                reading.acquire_gradient_buffer(bucket)
            case "reduce":
                reading.reduce(bucket)
            case "wait_reduce_scatter":
                reading.wait_reduce_scatter(bucket)
            case "replicate":
                reading.replicate(bucket)


def _wait_sends(reading: Reading, sent: list[tuple[BufferKey, int]]) -> None:
    """Wait for the sends and free what they sent; this happens before the next P2P batch at the latest."""
    reading.wait_sends()
    for buffer, register in sent:
        reading.free(buffer, (register,))


def _post_p2p(
    p: Program, action: P2PBatch, reading: Reading, coming: set[tuple[BufferKey, int]]
) -> list[tuple[BufferKey, int]]:
    """Post a P2P batch; what it receives is added to `coming`. -> the registers to free once they are sent."""
    resolved = tuple((t, (t.chunk, t.micro), _register(p, t)) for t in action.transfers)
    reading.post_p2p(resolved)
    coming |= {(buffer, r) for t, buffer, r in resolved if t.kind == "Recv"}
    return [(buffer, r) for t, buffer, r in resolved if t.kind == "Send" and r in p.chunks[t.chunk].freed_by_send]


def _register(p: Program, t: Transfer) -> int:
    """The register that a transfer sends or fills."""
    chunk = p.chunks[t.chunk]
    register = {
        ("Send", "value"): chunk.exit,
        ("Recv", "value"): chunk.entry,
        ("Send", "gradient"): chunk.entry_gradient,
        ("Recv", "gradient"): chunk.exit_gradient,
    }[t.kind, t.what]
    assert register is not None
    return register

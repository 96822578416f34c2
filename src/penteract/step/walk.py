"""The walk: the order of a step, said once. A reading answers each question with a price, a kernel, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from penteract.ops.tape import Call
from penteract.schedule.actions import Compute, Exchange, Overlapped, Transfer
from penteract.step.agreements import Agreement, OutsideTape, after_backward, at_begin, totals
from penteract.step.events import Around
from penteract.step.fsdp import Event
from penteract.step.program import BufferKey, Program

_QUIET = Around()


class Reading(Protocol):
    """What a reading answers. Registers live in buffers, one for each pass (chunk, micro-batch)."""

    def begin(self) -> None:
        """Data is in place."""

    def agree(self, agreement: Agreement) -> None:
        """All ranks of an axis put together the numbers that each has, and wait for them."""

    def scales(self) -> None:
        """What was agreed on before the first action is of use: of loss terms, and of weights that travel as codes."""

    def call(self, buffer: BufferKey, call: Call) -> None:
        """Run one call, a phase of an op or an end of a collective, on registers of a buffer."""
        ...

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        """These registers are read no more: their storage may be used again."""
        ...

    def exchange(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        """Post transfers of registers, one after the other as they are listed; values to receive get storage here."""

    def arrive(self, buffer: BufferKey, register: int) -> None:
        """Wait until a value that was asked for in an exchange is there: right before it is read."""

    def settle(self) -> None:
        """Wait until all that was sent has left: right before more is, so that nothing waits for a send meanwhile."""

    def wait_all_gather(self, bucket: int) -> None:
        """Wait until a bucket's parameters are whole."""

    def acquire_gradient_buffer(self, bucket: int) -> None:
        """Give gradients of a bucket, that are whole in one action alone, their place."""

    def reduce(self, bucket: int) -> None:
        """Put the sum of a bucket's gradients on the wire: to each who shares it its own shard, or all of it."""

    def wait_reduce_scatter(self, bucket: int) -> None:
        """Wait for a sum of gradients that are cut, and add it to the shard's."""

    def replicate(self, bucket: int) -> None:
        """Put the sum of a shard's gradients over its replicas on the wire."""

    def after(self, action: Compute | Overlapped | Exchange) -> None:
        """An action and all that belongs to it is done."""
        ...

    def widen(self, bucket: int) -> None:
        """Wait for a bucket's last sum, and make it numbers that the update reads."""

    def measure(self, bucket: int) -> None:
        """Add up the squares of this rank's shard of a bucket's gradients."""

    def factors(self) -> None:
        """Of the totals: what the updates of all buckets have in common, and how many targets the next step has."""

    def update(self, bucket: int) -> None:
        """Clip, and move a bucket's parameters: those of this rank's shard."""

    def gather(self, bucket: int) -> None:
        """Put shards of parameters on the wire, to all who share the bucket."""

    def end(self) -> None:
        """Move the routers' biases. What was gathered last is waited for at its next use."""


class Silent:
    """A reading that answers nothing: for those that answer some questions alone."""

    __slots__ = ()

    def begin(self) -> None: ...
    def agree(self, agreement: Agreement) -> None: ...
    def scales(self) -> None: ...
    def call(self, buffer: BufferKey, call: Call) -> None: ...
    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None: ...
    def exchange(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None: ...
    def arrive(self, buffer: BufferKey, register: int) -> None: ...
    def settle(self) -> None: ...
    def wait_all_gather(self, bucket: int) -> None: ...
    def acquire_gradient_buffer(self, bucket: int) -> None: ...
    def reduce(self, bucket: int) -> None: ...
    def wait_reduce_scatter(self, bucket: int) -> None: ...
    def replicate(self, bucket: int) -> None: ...
    def after(self, action: Compute | Overlapped | Exchange) -> None: ...
    def widen(self, bucket: int) -> None: ...
    def measure(self, bucket: int) -> None: ...
    def factors(self) -> None: ...
    def update(self, bucket: int) -> None: ...
    def gather(self, bucket: int) -> None: ...
    def end(self) -> None: ...


def walk(p: Program, reading: Reading, *, counted: bool = True) -> None:
    """One optimizer step of `p.rank`. `counted`: the step before told how many targets it has; a first step counts."""
    for question, *about in closing(p, _actions(p, reading, counted=counted)):
        getattr(reading, question)(*about)


def opening(p: OutsideTape, *, counted: bool = True) -> Iterator[tuple[Any, ...]]:
    """What comes before the first action, in order: a question of `Reading`, and what it is about."""
    yield ("begin",)
    yield from (("agree", agreement) for agreement in at_begin(p, counted=counted))
    yield ("scales",)


def closing(p: OutsideTape, summing: Iterable[int]) -> Iterator[tuple[Any, ...]]:
    """The same of what comes after the last action. `summing`: buckets whose sum is on the wire then, in the order in
    which it was put there."""
    yield from (("widen", b) for b in summing)
    yield from (("agree", agreement) for agreement in after_backward(p))
    for b, bucket in enumerate(p.buckets):
        if bucket.replicate_ranks[0] == p.rank:  # one rank counts each element
            yield "measure", b
    yield "agree", totals(p)
    yield ("factors",)
    for b, bucket in reversed(list(enumerate(p.buckets))):  # what the next step uses first
        yield "update", b
        if bucket.gathered_after_update:
            yield "gather", b  # under the updates of the buckets that follow, and the next step's first actions
    yield ("end",)


def walk_forward(p: Program, reading: Reading) -> None:
    """The forward passes alone, of a program compiled with `training=False`, and their losses."""
    _actions(p, reading, counted=False)
    reading.agree(totals(p))


def _actions(p: Program, reading: Reading, *, counted: bool) -> list[int]:
    """All that comes before the end. -> the buckets whose sum is on the wire then, in the order in which it was put
    there."""
    for question, *about in opening(p, counted=counted):
        getattr(reading, question)(*about)
    sent: list[tuple[BufferKey, int]] = []
    coming = set[tuple[BufferKey, int]]()
    flying: dict[int, None] = {}
    for a, action in enumerate(p.actions):
        if isinstance(action, Exchange):
            _settle(reading, sent)
            sent = _exchange(p, action, reading, coming)
        else:
            for position, (buffer, instruction) in enumerate(p.instructions(action)):
                around = p.events.get((a, position), _QUIET)
                _ask(p, reading, around.before, flying)
                for r in instruction.call.ins if coming else ():
                    if (buffer, r) in coming:
                        coming.remove((buffer, r))
                        reading.arrive(buffer, r)
                reading.call(buffer, instruction.call)
                reading.free(buffer, instruction.frees)
                _ask(p, reading, around.after, flying)
        reading.after(action)
    _settle(reading, sent)
    _ask(p, reading, p.events.get((len(p.actions), 0), _QUIET).before, flying)
    return list(flying)


def _ask(p: Program, reading: Reading, events: tuple[Event, ...], flying: dict[int, None]) -> None:
    """`flying`: buckets whose sum is on the wire, the last one that was put there last."""
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


def _settle(reading: Reading, sent: list[tuple[BufferKey, int]]) -> None:
    """A transfer pins what it sends until it is done: at the latest when the next one begins."""
    reading.settle()
    for buffer, register in sent:
        reading.free(buffer, (register,))


def _exchange(
    p: Program, action: Exchange, reading: Reading, coming: set[tuple[BufferKey, int]]
) -> list[tuple[BufferKey, int]]:
    """Post an exchange: what it receives is `coming`. -> the registers that nobody needs once they are sent."""
    resolved = tuple((t, (t.chunk, t.micro), _register(p, t)) for t in action.transfers)
    reading.exchange(resolved)
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

"""Memory offsets of all registers of a step in one block: planned once, so addresses are the same in every step.

The block begins with the temporary activations of the running action. Above them are activation buffers, as many as are
in use at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penteract.ops.tape import Call
from penteract.schedule.actions import Overlapped, Transfer
from penteract.step.offsets import Offsets, Span, offsets
from penteract.step.program import BufferKey, Program
from penteract.step.walk import Silent, walk, walk_forward
from penteract.units import Bytes

Pool = tuple[int, Span]  # the first chunk that uses these buffers, and their span


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """`offsets[i]`: the offset of the step's i-th new register. None: its size depends on routing, so it is not in the
    block."""

    size: Bytes
    offsets: tuple[Bytes | None, ...]
    buffers: Mapping[Pool, int] = field(default_factory=dict[Pool, int])  # the number of buffers of each pool


@dataclass(slots=True)
class _Planning(Silent):
    """The reading that plans. A register goes into the buffer of its micro-batch, which is the lowest free one."""

    p: Program
    host: bool
    of: tuple[Offsets, ...]  # by chunk
    pool: Mapping[tuple[int, Span], Pool]  # of a chunk's span
    placed: list[tuple[Pool, int, Bytes] | None] = field(default_factory=list["tuple[Pool, int, Bytes] | None"])
    held: dict[tuple[BufferKey, Span], int] = field(
        default_factory=dict[tuple[BufferKey, Span], int]
    )  # its number in the pool
    left: Counter[tuple[BufferKey, Span]] = field(
        default_factory=Counter[tuple[BufferKey, Span]]
    )  # live registers in it
    most: dict[Pool, int] = field(default_factory=dict[Pool, int])

    def call(self, buffer: BufferKey, call: Call) -> None:
        for r in call.outs:
            self._new(buffer, r)

    def post_p2p(self, transfers: tuple[tuple[Transfer, BufferKey, int], ...]) -> None:
        for t, buffer, r in transfers:
            if t.kind == "Recv":
                self._new(buffer, r)

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        for r in registers:
            if r in self.of[buffer[0]].at:
                span, _ = self.of[buffer[0]].at[r]
                if span[0] != span[1]:
                    self.left[buffer, span] -= 1
                    if not self.left[buffer, span]:
                        del self.held[buffer, span]

    def _new(self, buffer: BufferKey, register: int) -> None:
        spec = self.p.chunks[buffer[0]].specs[register]
        if spec.role == "host" or spec.pinned != self.host:
            return
        if register not in self.of[buffer[0]].at:
            self.placed.append(None)
            return
        span, offset = self.of[buffer[0]].at[register]
        if span[0] == span[1]:
            self.placed.append(((buffer[0], span), 0, offset))
            return
        self.left[buffer, span] += 1
        self.placed.append((self.pool[buffer[0], span], self._buffer(buffer, span), offset))

    def _buffer(self, buffer: BufferKey, span: Span) -> int:
        if (buffer, span) not in self.held:
            pool = self.pool[buffer[0], span]
            used = {i for (s, other), i in self.held.items() if self.pool[s[0], other] == pool}
            free = next(i for i in range(len(used) + 1) if i not in used)
            self.held[buffer, span] = free
            self.most[pool] = max(self.most.get(pool, 0), free + 1)
        return self.held[buffer, span]


def temporary_bases(of: tuple[Offsets, ...], overlapped: bool) -> tuple[dict[str, Bytes], Bytes]:
    """-> where the temporary activations of each action begin, and their bytes in all. Those of two overlapped actions
    do not share memory."""
    most = Counter[str]()
    for one in of:
        for name, temporary in one.temporary.items():
            most[name] = max(most[name], temporary.size)
    if not overlapped:
        return dict.fromkeys(most, 0), max(most.values(), default=0)
    return {"Bwd": 0, "Fwd": most["Bwd"]}, most["Bwd"] + most["Fwd"]


def share_buffers(buffers: Sequence[Mapping[Span, Bytes]]) -> tuple[dict[tuple[int, Span], Pool], dict[Pool, Bytes]]:
    """Chunks whose buffers of a span have similar sizes (within an eighth) take them from one pool.

    `buffers`: for each chunk, bytes by span. -> the pool of each chunk's span, and the bytes of a buffer of each pool.
    """
    if len(buffers) == 1:
        return {(0, span): (0, span) for span in buffers[0]}, {(0, span): size for span, size in buffers[0].items()}
    pool: dict[tuple[int, Span], Pool] = {}
    size: dict[Pool, Bytes] = {}
    for span in sorted({span for one in buffers for span in one}):
        having = sorted((c for c, one in enumerate(buffers) if span in one), key=lambda c: (-buffers[c][span], c))
        first = having[0]
        for c in having:
            if buffers[c][span] * 8 < buffers[first][span] * 7:
                first = c
            pool[c, span] = (first, span)
        size |= {(c, span): buffers[c][span] for c, s in pool.values() if s == span}
    return pool, size


def plan_arena(p: Program, *, training: bool = True, host: bool = False) -> ArenaPlan:
    """Walk the step once and give every register its offset: those on the device, or with `host` those on the host."""
    of = tuple(offsets(c, p.widths, host=host) for c in p.chunks)
    pool, block = share_buffers([one.buffers for one in of])
    planning = _Planning(p, host, of, pool)
    (walk if training else walk_forward)(p, planning)
    bases, size = temporary_bases(planning.of, any(isinstance(a, Overlapped) for a in p.actions))
    begin: dict[Pool, Bytes] = {}
    for pool, count in sorted(planning.most.items()):
        begin[pool], size = size, size + count * block[pool]

    def each() -> Iterator[Bytes | None]:
        for at in planning.placed:
            if at is None:
                yield None
                continue
            pool, buffer, offset = at
            temporary = pool[1][0] == pool[1][1]
            yield offset + (bases[pool[1][0]] if temporary else begin[pool] + buffer * block[pool])

    return ArenaPlan(size, tuple(each()), planning.most)

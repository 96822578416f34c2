"""Where the registers of one chunk lie, before it is known how often they live at once.

A register is *scratch* when it is born and dies in one action, and then it lies in its layer's scratch, the same for
every layer of a kind; what crosses from one layer to the next has a place at the border. All others are *kept* in the
buffer of their micro-batch: one block for each span, such as from `Fwd` to `Bwd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penteract.ops.lower import Chunk
from penteract.ops.spec import Received, Spec, Widths
from penteract.step.fit import first_fit
from penteract.units import Bytes

ALIGNMENT = 512  # of a register's first byte: what kernels with wide loads ask for

Span = tuple[str, str]  # the action in which a register is born, and the one in which it dies
Instant = tuple[str, int, int]  # action, its run of instructions of one layer, instruction
_Need = tuple[int, int, Bytes]  # the instructions that make and free a register, its bytes
BORDERS = ("Recv value", "Recv gradient", "Send value", "Send gradient")  # as moments: outside of any action


class Life(NamedTuple):
    """From when to when a register is alive."""

    born: Instant
    dies: Instant

    @property
    def span(self) -> Span:
        return self.born[0], self.dies[0]

    @property
    def scratch(self) -> bool:
        return self.born[0] == self.dies[0]


@dataclass(frozen=True, slots=True)
class Scratch:
    """What an action takes beside the buffers: `border` for what crosses between layers, `layer` for one layer, `ring`
    for what is on its way to or from the host."""

    border: Bytes = 0
    layer: Bytes = 0
    ring: Bytes = 0

    @property
    def size(self) -> Bytes:
        return self.border + self.layer + self.ring


@dataclass(frozen=True, slots=True)
class Offsets:
    """`buffers`: bytes of one buffer by span. `at`: a register's span and its offset in that buffer, or in the scratch.

    `lives` of all registers; `sizes` of those that have a place.
    """

    buffers: Mapping[Span, Bytes]
    scratch: Mapping[str, Scratch]
    at: Mapping[int, tuple[Span, Bytes]]
    lives: Mapping[int, Life]
    sizes: Mapping[int, Bytes]


def aligned(spec: Spec, widths: Widths) -> Bytes:
    """Bytes that a register takes; nothing where it lies elsewhere: on the host, or where routing decides its size."""
    n = widths[spec.role]
    for d in spec.shape:
        if isinstance(d, Received):
            return 0
        n *= d
    return -(-n // ALIGNMENT) * ALIGNMENT if n or spec.role != "host" else 0


def lives(chunk: Chunk) -> dict[int, Life]:
    """Every register's life, in the order in which they are born."""
    born: dict[int, Instant] = {}
    dies: dict[int, Instant] = {}
    born |= {
        r: (name, 0, 0)
        for r, name in zip((chunk.entry, chunk.exit_gradient), BORDERS[:2], strict=True)
        if r is not None
    }
    for name, instructions in chunk.actions.items():
        run, layer = 0, None
        for i, instruction in enumerate(instructions):
            if instruction.call.site.layer != layer:
                run, layer = run + 1, instruction.call.site.layer
            now = (name, run, i)
            for r in instruction.call.outs:
                born[r] = now
            for r in instruction.frees:
                dies[r] = now
    sent = zip((chunk.exit, chunk.entry_gradient), BORDERS[2:], strict=True)
    dies |= {r: (name, 0, 0) for r, name in sent if r in chunk.freed_by_send}
    return {r: Life(at, dies[r]) for r, at in born.items() if r in dies}


def places(chunk: Chunk, widths: Widths, *, host: bool = False) -> Offsets:
    """Give every register of a chunk its place on the device, or on the host."""
    alive, specs = lives(chunk), chunk.specs
    sizes = {r: n for r in alive if specs[r].pinned == host and (n := aligned(specs[r], widths))}
    return lay_out(chunk.actions, alive, sizes, chunk.turns)


def lay_out(
    actions: Iterable[str], alive: Mapping[int, Life], sizes: Mapping[int, Bytes], turns: Mapping[int, int]
) -> Offsets:
    """Give every register that has a size its place. Those with a turn take turns at two places."""
    at: dict[int, tuple[Span, Bytes]] = {}
    buffers: dict[Span, Bytes] = {}
    inside: dict[str, dict[int, dict[int, _Need]]] = {name: {} for name in actions}  # scratch of one run
    across: dict[str, dict[int, _Need]] = {name: {} for name in inside}  # scratch that crosses runs
    ring: dict[str, dict[int, Bytes]] = {name: {} for name in inside}  # bytes of each turn
    for r, n in sizes.items():
        (name, run, i), (last, last_run, j) = alive[r]
        if r in turns:
            begin = ring[name].get(turns[r], 0)
            at[r], ring[name][turns[r]] = ((name, name), begin), begin + n
        elif name != last:
            begin = buffers.get((name, last), 0)
            at[r], buffers[name, last] = ((name, last), begin), begin + n
        elif run == last_run:
            inside[name].setdefault(run, {})[r] = i, j, n
        else:
            across[name][r] = i, j, n
    scratch: dict[str, Scratch] = {}
    for name, runs in inside.items():
        span = (name, name)
        border, where = first_fit(across[name].values())
        at |= {r: (span, offset) for r, offset in zip(across[name], where, strict=True)}
        layer = 0
        for registers in runs.values():
            size, where = first_fit(registers.values())
            at |= {r: (span, border + offset) for r, offset in zip(registers, where, strict=True)}
            layer = max(layer, size)
        place = max(ring[name].values(), default=0)
        for r in turns:
            if r in sizes and alive[r].born[0] == name:
                at[r] = (span, border + layer + turns[r] % 2 * place + at[r][1])
        scratch[name] = Scratch(border, layer, place * min(2, len(ring[name])))
    return Offsets(buffers, scratch, at, alive, sizes)

"""Memory offsets of the registers of one chunk, within its buffers; how many buffers are needed is planned later.

A register is *temporary* if it is born and dies in one action. Then it is in the temporary memory of its layer, which
all layers share; values that go from one layer to the next are in a separate part, the border. All other registers are
*kept* in the buffer of their micro-batch: one block for each span, such as from `Fwd` to `Bwd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penteract.ops.lower import Chunk
from penteract.ops.spec import Received, Spec, Widths
from penteract.step.fit import first_fit
from penteract.units import Bytes

ALIGNMENT = 512  # bytes: of a register's address, for kernels with wide loads

Span = tuple[str, str]  # the action in which a register is born, and the one in which it dies
Instant = tuple[str, int, int]  # action, its run of instructions of one layer, instruction
_Need = tuple[int, int, Bytes]  # the instructions that make and free a register, its bytes
BORDERS = ("Recv value", "Recv gradient", "Send value", "Send gradient")  # as instants: outside of any action


class Life(NamedTuple):
    """From when to when a register is alive."""

    born: Instant
    dies: Instant

    @property
    def span(self) -> Span:
        """The action in which it is born, and the one in which it dies."""
        return self.born[0], self.dies[0]

    @property
    def temporary(self) -> bool:
        """Whether it is born and dies in one action."""
        return self.born[0] == self.dies[0]


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Memory of an action in addition to the buffers: `border` for values between layers, `layer` for one layer,
    `in_transit` for copies to or from the host."""

    border: Bytes = 0
    layer: Bytes = 0
    in_transit: Bytes = 0

    @property
    def size(self) -> Bytes:
        """Bytes of all three together."""
        return self.border + self.layer + self.in_transit


@dataclass(frozen=True, slots=True)
class Offsets:
    """`buffers`: bytes of one buffer by span. `at`: register -> its span, and its offset in that buffer or in temporary
    memory.

    `lives`: of all registers; `sizes`: of those that have an offset.
    """

    buffers: Mapping[Span, Bytes]
    temporary: Mapping[str, Temporaries]
    at: Mapping[int, tuple[Span, Bytes]]
    lives: Mapping[int, Life]
    sizes: Mapping[int, Bytes]


def aligned(spec: Spec, widths: Widths) -> Bytes:
    """Bytes that a register takes; 0 if it is elsewhere: of role "host", or with a size that routing decides."""
    n = widths[spec.role]
    for d in spec.shape:
        if isinstance(d, Received):
            d = d.at_most
            if not d:
                return 0
        n *= d
    return -(-n // ALIGNMENT) * ALIGNMENT if n or spec.role != "host" else 0


def lives(chunk: Chunk) -> dict[int, Life]:
    """Every register's lifetime, in order of birth."""
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


def offsets(chunk: Chunk, widths: Widths, *, host: bool = False) -> Offsets:
    """Give every register of a chunk its offset on the device, or on the host."""
    alive, specs = lives(chunk), chunk.specs
    sizes = {r: n for r in alive if specs[r].pinned == host and (n := aligned(specs[r], widths))}
    return lay_out(chunk.actions, alive, sizes, chunk.turns)


def lay_out(
    actions: Iterable[str], alive: Mapping[int, Life], sizes: Mapping[int, Bytes], turns: Mapping[int, int]
) -> Offsets:
    """Give every register that has a size its offset. Those with a turn alternate between two entries of a ring
    buffer."""
    at: dict[int, tuple[Span, Bytes]] = {}
    buffers: dict[Span, Bytes] = {}
    inside: dict[str, dict[int, dict[int, _Need]]] = {name: {} for name in actions}  # temporary activations of one run
    across: dict[str, dict[int, _Need]] = {name: {} for name in inside}  # those that outlive a run
    in_transit: dict[str, dict[int, Bytes]] = {name: {} for name in inside}  # bytes of each turn
    for r, n in sizes.items():
        (name, run, i), (last, last_run, j) = alive[r]
        if r in turns:
            begin = in_transit[name].get(turns[r], 0)
            at[r], in_transit[name][turns[r]] = ((name, name), begin), begin + n
        elif name != last:
            begin = buffers.get((name, last), 0)
            at[r], buffers[name, last] = ((name, last), begin), begin + n
        elif run == last_run:
            inside[name].setdefault(run, {})[r] = i, j, n
        else:
            across[name][r] = i, j, n
    temporary: dict[str, Temporaries] = {}
    for name, runs in inside.items():
        span = (name, name)
        border, where = first_fit(across[name].values())
        at |= {r: (span, offset) for r, offset in zip(across[name], where, strict=True)}
        layer = 0
        for registers in runs.values():
            size, where = first_fit(registers.values())
            at |= {r: (span, border + offset) for r, offset in zip(registers, where, strict=True)}
            layer = max(layer, size)
        entry = max(in_transit[name].values(), default=0)
        for r in turns:
            if r in sizes and alive[r].born[0] == name:
                at[r] = (span, border + layer + turns[r] % 2 * entry + at[r][1])
        temporary[name] = Temporaries(border, layer, entry * min(2, len(in_transit[name])))
    return Offsets(buffers, temporary, at, alive, sizes)

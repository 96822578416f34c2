"""A stage as a chain of pieces (layer programs). Their memory adds up, but a register at a border is shared by both
neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penteract.ops.spec import Spec
from penteract.readings.layers.layer_memory import LayerMemory
from penteract.readings.layers.layer_program import LayerType
from penteract.step.fit import first_fit
from penteract.step.offsets import Life, Span
from penteract.units import Bytes

StageLayers = tuple[tuple[LayerType, int], ...]  # the layer types of a stage in order, and how many in a row
Run = tuple[LayerMemory, int]  # the memory of a piece, and how many equal ones are in a row
_Time = tuple[int, int, int]  # index of the piece in the action, its run of one layer, instruction
_Crossing = tuple[_Time, _Time, Bytes]

_ENOUGH = 3  # equal pieces in a row show every kind of border that a longer run has
_LATER = {"Fwd": 0, "Bwd": 1, "Inp": 1, "Wgt": 2}


@dataclass(frozen=True, slots=True, eq=False)
class StageSum:
    """Memory of one pass of a micro-batch through a stage: fields as in `LayerMemory`, `buffers` include borders."""

    inputs: Mapping[str, Spec]
    fp8_state_bytes: Bytes
    buffers: Mapping[Span, Bytes]
    temporary: Bytes  # of the action that takes most
    workspace: Bytes
    routed: Mapping[Span, Bytes]
    routed_temporary: Bytes
    host: Mapping[Span, Bytes]


@dataclass(frozen=True, slots=True)
class Borders:
    """Bytes kept at the borders of a chain, by span (`buffers`), and those that cross a border within one action
    (`temporary`)."""

    buffers: Mapping[Span, Bytes]
    temporary: Mapping[str, Bytes]


def shown(chain: Sequence[Run]) -> tuple[Run, ...]:
    """A chain with long runs of equal pieces shortened to `_ENOUGH`: it has the same kinds of borders."""
    return tuple([(piece, min(n, _ENOUGH)) for piece, n in chain])


def add_up(chain: Sequence[Run], borders: Borders) -> StageSum:
    """The sum of a chain of pieces, first to last. `borders`: those of the shortened chain (`shown`)."""
    buffers, temporary, routed, host = dict(borders.buffers), dict[str, Bytes](), dict[Span, Bytes](), Counter[Span]()
    in_transit: dict[str, tuple[int, Bytes]] = {}  # by action: pieces that have some, bytes of the largest
    for piece, n in chain:
        for span, amount in piece.buffers.items():
            buffers[span] = buffers.get(span, 0) + n * amount
        for span, amount in piece.routed.items():
            routed[span] = routed.get(span, 0) + n * amount
        for name, amount in piece.temporary.items():
            temporary[name] = max(temporary.get(name, 0), amount)
        for name, amount in piece.in_transit.items():
            count, most = in_transit.get(name, (0, 0))
            in_transit[name] = count + n, max(most, amount)
        for span, amount in piece.host.items():
            host[span] += n * amount
        if n > _ENOUGH:
            for span, _, _ in _shared(piece, piece):
                if span[0] != span[1]:
                    buffers[span] = buffers.get(span, 0) + (n - _ENOUGH) * piece.stream
    for name, amount in borders.temporary.items():
        temporary[name] = temporary.get(name, 0) + amount
    for name, (count, most) in in_transit.items():
        temporary[name] += min(2, count) * most
    return StageSum(
        inputs={name: spec for piece, _ in chain for name, spec in piece.inputs.items()},
        fp8_state_bytes=sum([n * piece.fp8_state_bytes for piece, n in chain]),
        buffers=buffers,
        temporary=max(temporary.values()),
        workspace=max(piece.workspace for piece, _ in chain), routed=routed,
        routed_temporary=max((n for piece, _ in chain for n in piece.routed_temporary.values()), default=0),
        host=host,
    )  # fmt: skip


def borders(chain: Sequence[Run]) -> Borders:
    """The borders of a chain, from every one of its pieces."""
    buffers, crossing = Counter[Span](), dict[str, list[_Crossing]]()
    row = [piece for piece, n in chain for _ in range(n)]
    first, last = row[0], row[-1]
    for life, piece in zip((first.borders[0], first.borders[3], last.borders[1], last.borders[2]),
                           (first, first, last, last), strict=True):  # fmt: skip
        if life is not None:
            buffers[life.span] += piece.stream
    for at, piece in enumerate(row):
        for name, registers in piece.crossing.items():
            place = at if name == "Fwd" else len(row) - 1 - at
            crossing.setdefault(name, []).extend(((place, *born), (place, *dies), n) for born, dies, n in registers)
    for at, (a, b) in enumerate(pairwise(row)):
        for span, begin, end in _shared(a, b):
            if span[0] != span[1]:
                buffers[span] += a.stream
            elif span[0] == "Fwd":
                crossing.setdefault("Fwd", []).append(((at, *begin), (at + 1, *end), a.stream))
            else:
                place = len(row) - 2 - at  # of b, which runs first
                crossing.setdefault(span[0], []).append(((place, *begin), (place + 1, *end), a.stream))
    return Borders(buffers, {name: first_fit(sorted(registers))[0] for name, registers in crossing.items()})


def _shared(a: LayerMemory, b: LayerMemory) -> Iterator[tuple[Span, tuple[int, int], tuple[int, int]]]:
    """The two registers at the border of neighbours: a value from a to b, and its gradient from b to a.

    -> its span, when it is born in its piece, and when it dies in the other if that is in the same action.
    """
    _, value, gradient_back, _ = a.borders
    entry, _, _, gradient = b.borders
    assert value is not None and entry is not None and gradient is not None and gradient_back is not None
    yield _joined(value, entry)
    yield _joined(gradient, gradient_back)


def _joined(maker: Life, user: Life) -> tuple[Span, tuple[int, int], tuple[int, int]]:
    born, dies = maker.born[0], user.dies[0]
    if maker.dies[0] in _LATER and _LATER[maker.dies[0]] > _LATER[dies]:
        dies = maker.dies[0]
    return (born, dies), maker.born[1:], user.dies[1:]

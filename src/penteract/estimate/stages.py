"""A stage as a chain of pieces: what they keep adds up, and registers at their borders belong to both neighbours."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penteract.estimate.pieces import Piece, Wire
from penteract.ops.spec import Spec
from penteract.step.places import Life, Span
from penteract.units import Bytes, Flops

Run = tuple[Piece, int]  # a piece, and how many times in a row
_Time = tuple[int, int, int]  # piece in the order of the action, its run of one layer, instruction
_Crossing = tuple[_Time, _Time, Bytes]

_ENOUGH = 3  # of a run of equal pieces, to see all that can be at their borders
_LATER = {"Fwd": 0, "Bwd": 1, "Inp": 1, "Wgt": 2}


@dataclass(frozen=True, slots=True)
class StageSum:
    """What one pass of a micro-batch through a stage takes on a rank. As `Piece`, with the stage's borders inside."""

    inputs: Mapping[str, Spec]
    slots: Mapping[Span, Bytes]
    scratch: Mapping[str, Bytes]
    flops: Mapping[str, Flops]
    wires: Mapping[Wire, Bytes]
    workspace: Bytes
    routed: Mapping[Span, Bytes]
    routed_scratch: Bytes


def add_up(chain: Sequence[Run]) -> StageSum:
    """The sum of a chain of pieces, first to last."""
    slots, routed = Counter[Span](), Counter[Span]()
    flops, wires, scratch = Counter[str](), Counter[Wire](), Counter[str]()
    for piece, n in chain:
        for total, part in ((slots, piece.slots), (routed, piece.routed), (flops, piece.flops), (wires, piece.wires)):
            for key, amount in part.items():
                total[key] += n * amount  # type: ignore[index]
        for name, amount in piece.scratch.items():
            scratch[name] = max(scratch[name], amount)
    crossing = _borders(chain, slots)
    for name, registers in crossing.items():
        scratch[name] += _first_fit(registers)
    return StageSum(
        inputs={name: spec for piece, _ in chain for name, spec in piece.inputs.items()},
        slots=slots, scratch=scratch, flops=flops, wires=wires,
        workspace=max(piece.workspace for piece, _ in chain), routed=routed,
        routed_scratch=max((n for piece, _ in chain for n in piece.routed_scratch.values()), default=0),
    )  # fmt: skip


def _borders(chain: Sequence[Run], slots: Counter[Span]) -> dict[str, list[_Crossing]]:
    """Put what is kept at borders into `slots`; returns what crosses from piece to piece in one action."""
    crossing: dict[str, list[_Crossing]] = {}
    shown = [piece for piece, n in chain for _ in range(min(n, _ENOUGH))]
    for piece, n in chain:
        for span, amount in _repeated(piece, n - min(n, _ENOUGH)):
            slots[span] += amount
    first, last = shown[0], shown[-1]
    for life, piece in zip((first.borders[0], first.borders[3], last.borders[1], last.borders[2]),
                           (first, first, last, last), strict=True):  # fmt: skip
        if life is not None:
            slots[life.span] += piece.stream
    for at, piece in enumerate(shown):
        for name, registers in piece.crossing.items():
            place = at if name == "Fwd" else len(shown) - 1 - at
            crossing.setdefault(name, []).extend(((place, *born), (place, *dies), n) for born, dies, n in registers)
    for at, (a, b) in enumerate(pairwise(shown)):
        for span, begin, end in _shared(a, b):
            if span[0] != span[1]:
                slots[span] += a.stream
            elif span[0] == "Fwd":
                crossing.setdefault("Fwd", []).append(((at, *begin), (at + 1, *end), a.stream))
            else:
                place = len(shown) - 2 - at  # of b, which runs first
                crossing.setdefault(span[0], []).append(((place, *begin), (place + 1, *end), a.stream))
    return crossing


def _repeated(piece: Piece, times: int) -> Iterator[tuple[Span, Bytes]]:
    """What is kept at the borders between equal pieces that are not looked at one by one."""
    if times > 0:
        for span, _, _ in _shared(piece, piece):
            if span[0] != span[1]:
                yield span, times * piece.stream


def _shared(a: Piece, b: Piece) -> Iterator[tuple[Span, tuple[int, int], tuple[int, int]]]:
    """The two registers at the border of neighbours: a value from a to b, and its gradient from b to a.

    -> its span, when it is born (in its piece), and when it dies there if that is in the same action.
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


def _first_fit(registers: Sequence[_Crossing]) -> Bytes:
    """Bytes for registers that each take the lowest gap at their birth."""
    taken: list[tuple[Bytes, Bytes, _Time]] = []
    size = 0
    for born, dies, n in sorted(registers):
        taken = [t for t in taken if t[2] >= born]
        begin = 0
        for low, high, _ in taken:
            if low - begin >= n:
                break
            begin = high
        insort(taken, (begin, begin + n, dies))
        size = max(size, begin + n)
    return size

"""Memory of a pipeline stage as a sum over its layers. Activations between layers (at borders) belong to two layers and
are counted once. The embedding and the head count as layers.

A register's *life* is from the instruction that makes it to the one that frees it; its *span* is the pair of actions in
which these are, such as from `Fwd` to `Bwd` (`step/offsets.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penteract.ops.spec import Spec
from penteract.readings.layers.layer_memory import LayerMemory
from penteract.readings.layers.layer_program import LayerType
from penteract.step.fit import first_fit
from penteract.step.offsets import Life, Span
from penteract.units import Bytes

StageLayers = tuple[tuple[LayerType, int], ...]  # the layer types of a stage in order, and how many in a row
RepeatedLayer = tuple[LayerMemory, int]  # the memory of a layer, and how many equal ones are in a row
_Instant = tuple[int, int, int]  # index of the layer in the action, its run of one layer, instruction
_Crossing = tuple[_Instant, _Instant, Bytes]

_MAX_REPEATS = 3  # equal layers in a row have every kind of border that a longer run has
_ACTION_ORDER = {"Fwd": 0, "Bwd": 1, "Inp": 1, "Wgt": 2}


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


def counted(stages: Iterable[StageLayers]) -> Counter[LayerType]:
    """How many layers of these stages each type has. Where types alternate, few types are many runs."""
    found = Counter[LayerType]()
    for chain in stages:
        for kind, n in chain:
            found[kind] += n
    return found


def shortened(chain: Sequence[RepeatedLayer]) -> tuple[RepeatedLayer, ...]:
    """A chain with long runs of equal layers shortened to `_MAX_REPEATS`: it has the same kinds of borders."""
    return tuple([(layer, min(n, _MAX_REPEATS)) for layer, n in chain])


def borders(chain: Sequence[RepeatedLayer]) -> Borders:
    """The borders of a chain, from every one of its layers."""
    buffers, crossing = Counter[Span](), dict[str, list[_Crossing]]()
    row = [layer for layer, n in chain for _ in range(n)]
    first, last = row[0], row[-1]
    for life, layer in (
        (first.borders.input, first), (first.borders.input_gradient, first),
        (last.borders.output, last), (last.borders.output_gradient, last),
    ):  # fmt: skip
        if life is not None:
            buffers[life.span] += layer.border_bytes
    for at, layer in enumerate(row):
        for name, registers in layer.crossing.items():
            place = at if name == "Fwd" else len(row) - 1 - at
            crossing.setdefault(name, []).extend(((place, *born), (place, *dies), n) for born, dies, n in registers)
    for at, (a, b) in enumerate(pairwise(row)):
        for span, begin, end in _border_registers(a, b):
            if span[0] != span[1]:
                buffers[span] += a.border_bytes
            elif span[0] == "Fwd":
                crossing.setdefault("Fwd", []).append(((at, *begin), (at + 1, *end), a.border_bytes))
            else:
                place = len(row) - 2 - at  # of b, which runs first
                crossing.setdefault(span[0], []).append(((place, *begin), (place + 1, *end), a.border_bytes))
    return Borders(buffers, {name: first_fit(sorted(registers))[0] for name, registers in crossing.items()})


def _border_registers(a: LayerMemory, b: LayerMemory) -> Iterator[tuple[Span, tuple[int, int], tuple[int, int]]]:
    """The two registers at the border of neighbours: a value from a to b, and its gradient from b to a.

    -> its span, when it is born in its layer, and when it dies in the other if that is in the same action.
    """
    value, gradient_used = a.borders.output, a.borders.output_gradient
    value_used, gradient = b.borders.input, b.borders.input_gradient
    assert value is not None and value_used is not None and gradient is not None and gradient_used is not None
    yield _joined(value, value_used)
    yield _joined(gradient, gradient_used)


def _joined(maker: Life, user: Life) -> tuple[Span, tuple[int, int], tuple[int, int]]:
    born, dies = maker.born[0], user.dies[0]
    if maker.dies[0] in _ACTION_ORDER and _ACTION_ORDER[maker.dies[0]] > _ACTION_ORDER[dies]:
        dies = maker.dies[0]
    return (born, dies), maker.born[1:], user.dies[1:]


def add_up(chain: Sequence[RepeatedLayer], borders: Borders) -> StageSum:
    """The sum of a chain of layers, first to last. `borders`: those of the shortened chain (`shortened`)."""
    buffers, temporary, routed, host = dict(borders.buffers), dict[str, Bytes](), dict[Span, Bytes](), Counter[Span]()
    in_transit: dict[str, tuple[int, Bytes]] = {}  # by action: layers that have some, bytes of the largest
    for layer, n in chain:
        for span, amount in layer.buffers.items():
            buffers[span] = buffers.get(span, 0) + n * amount
        for span, amount in layer.routed.items():
            routed[span] = routed.get(span, 0) + n * amount
        for name, amount in layer.temporary.items():
            temporary[name] = max(temporary.get(name, 0), amount)
        for name, amount in layer.in_transit.items():
            count, most = in_transit.get(name, (0, 0))
            in_transit[name] = count + n, max(most, amount)
        for span, amount in layer.host.items():
            host[span] += n * amount
        if n > _MAX_REPEATS:  # the borders between the repeats that `shortened` left out
            for span, _, _ in _border_registers(layer, layer):
                if span[0] != span[1]:
                    buffers[span] = buffers.get(span, 0) + (n - _MAX_REPEATS) * layer.border_bytes
    for name, amount in borders.temporary.items():
        temporary[name] = temporary.get(name, 0) + amount
    for name, (count, most) in in_transit.items():
        temporary[name] += min(2, count) * most  # a ring buffer of two places (`ops/offload.py`)
    return StageSum(
        inputs={name: spec for layer, _ in chain for name, spec in layer.inputs.items()},
        fp8_state_bytes=sum([n * layer.fp8_state_bytes for layer, n in chain]),
        buffers=buffers,
        temporary=max(temporary.values()),
        workspace=max(layer.workspace for layer, _ in chain), routed=routed,
        routed_temporary=max((n for layer, _ in chain for n in layer.routed_temporary.values()), default=0),
        host=host,
    )  # fmt: skip

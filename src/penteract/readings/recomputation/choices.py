"""What each set of ops to recompute keeps and costs, by layer type: sums over groups of ops (`ops/liveness.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.recompute import NONE
from penteract.ops.liveness import Liveness, LivenessAnalysis, groups
from penteract.ops.spec import Spec
from penteract.ops.tape import OpCall, Tape
from penteract.readings.estimator import Estimator
from penteract.readings.layers.layer_program import LayerType, bytes_of
from penteract.readings.time.cost import DeviceCosts, seconds_alone
from penteract.step.offsets import aligned
from penteract.units import Bytes, Seconds

MANY = 2**15  # sets


class Choice(NamedTuple):
    """A set of ops to recompute: for each layer type, the bytes it keeps of those that can be dropped, and the seconds
    of its recomputation."""

    op_names: tuple[str, ...]
    kept: tuple[Bytes, ...]
    cost: tuple[Seconds, ...]

    def __or__(self, other: Choice) -> Choice:
        """The union of two independent sets."""
        kept = tuple([a + b for a, b in zip(self.kept, other.kept, strict=True)])
        return Choice(
            self.op_names + other.op_names, kept, tuple([a + b for a, b in zip(self.cost, other.cost, strict=True)])
        )

    @property
    def sorted(self) -> Choice:
        """The same with its ops in the order of a layout's `recompute`."""
        return self._replace(op_names=tuple(dict.fromkeys((*NONE, *sorted(self.op_names)))))


class Choices(NamedTuple):
    """Every distinct set (only the frontier if they are more than `MANY`); and the frontier: sets that no other set
    beats in both memory and cost."""

    every: tuple[Choice, ...]
    frontier: tuple[Choice, ...]

    @staticmethod
    def of(estimator: Estimator, kinds: Sequence[LayerType], plain: Layout) -> Choices:
        """The choices for these layer types. `plain`: the layout without recomputation."""
        tapes = [estimator.composer.recorder.tape(plain, kind) for kind in kinds]
        measures = [_measure(estimator, kind, tape, plain) for kind, tape in zip(kinds, tapes, strict=True)]
        tables = [
            [
                Choice(tuple(op_names), *zip(*map(_kept_and_cost, measures, lives_of), strict=True))  # type: ignore[arg-type]
                for op_names, lives_of in table
            ]
            for table in groups([LivenessAnalysis.of(tape) for tape in tapes], NONE)
        ]
        none = Choice((), (0,) * len(kinds), (0.0,) * len(kinds))
        every, best = [none], [none]
        many = prod(map(len, tables)) > MANY
        for table in tables:
            every = every if many else [a | b for a in every for b in table]
            best = frontier([a | b for a in best for b in frontier(table)])
        chosen = tuple([c.sorted for c in best])
        return Choices(chosen if many else tuple([c.sorted for c in every]), chosen)


def frontier(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that no other beats in both memory and cost; of equal ones that with fewest ops."""
    alike = defaultdict[tuple[object, ...], list[Choice]](list)
    some = sorted(choices, key=lambda c: (sum(c.cost), sum(c.kept), len(c.op_names), c.op_names))
    n = len(some[0].kept)
    main = max(range(n), key=lambda k: len({(c.kept[k], c.cost[k]) for c in some}))
    for c in some:  # among choices that are equal in all types but `main`, those in order of cost that keep ever less
        alike[tuple([(c.kept[k], c.cost[k]) for k in range(n) if k != main])].append(c)
    left = [c for same in alike.values() for c in _descending(same, main)]
    left.sort(key=lambda c: (sum(c.cost), sum(c.kept), len(c.op_names), c.op_names))
    found = list[Choice]()
    for c in left:
        if not any(_no_worse(other, c) for other in found):
            found.append(c)
    return found


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of the choices, by their sums over layer types: no mixture of two others is better."""
    found = list[Choice]()
    for c in sorted(choices, key=lambda c: (sum(c.kept), sum(c.cost))):
        while len(found) > 1 and _orientation(found[-2], found[-1], c) <= 0:
            found.pop()
        found.append(c)
    return found


def _orientation(a: Choice, b: Choice, c: Choice) -> float:
    (x, u), (y, v) = ((sum(q.kept) - sum(a.kept), sum(q.cost) - sum(a.cost)) for q in (b, c))
    return x * v - y * u


def _descending(some: Sequence[Choice], kind: int) -> Iterable[Choice]:
    least: float = inf
    for c in sorted(some, key=lambda c: (c.cost[kind], c.kept[kind], len(c.op_names), c.op_names)):
        if c.kept[kind] < least:
            least = c.kept[kind]
            yield c


def _no_worse(a: Choice, b: Choice) -> bool:
    for x, y in zip(a.kept, b.kept, strict=True):
        if x > y:
            return False
    return all([x <= y for x, y in zip(a.cost, b.cost, strict=True)])


_Measure = tuple[Callable[[int], Bytes], Callable[[int], Seconds]]  # of a register; of an op, by its identity


def _measure(estimator: Estimator, kind: LayerType, tape: Tape, layout: Layout) -> _Measure:
    composer = estimator.composer
    load, widths = composer.load(layout), composer.widths
    # As they are recomputed: one by one, and whole.
    apart = layout.put(fuse=tuple(name for name in layout.fuse if name != "add"), collectives="library")
    device = estimator.steps.device(layout)
    alone = seconds_alone(composer.layer_program(apart, kind), device)
    spent = {id(op): sum(alone.get(place, 0.0) for place in places) for op, places in _places(tape)}
    specs = dict(enumerate(tape.specs))
    for op in (op for op in tape.ops if op.again is not None):
        spent[id(op.again)] = _again(device, op, specs)

    def size(r: int) -> Bytes:
        return aligned(tape.specs[r], widths) or bytes_of(tape.specs[r], widths, load)

    return size, spent.__getitem__


def _again(device: DeviceCosts, op: OpCall, specs: Mapping[int, Spec]) -> Seconds:
    """Of making the first result of an op again: what it adds to the call of input gradients that makes it, too."""
    assert op.again is not None
    if op.joint_again is None or op.joint_back is None or op.parts_back is not None:
        return device.call(op.again.site, "forward", specs, (*op.again.ins, *op.again.outs))[1]
    registers, sites = (*op.extras, *op.outs), (op.joint_again, op.joint_back)
    more, without = (device.call(site, "input_gradient", specs, registers)[1] for site in sites)
    return more - without


def _places(tape: Tape) -> Iterable[tuple[object, range]]:
    """Each op, and the indices of its sites among all that lowering can call."""
    at = 0
    for op in tape.ops:
        more = 1 if op.program is None else len(op.program.forward) + len(op.program.backward)
        yield op, range(at, at + more)
        at += more


def _kept_and_cost(measure: _Measure, liveness: Liveness) -> tuple[Bytes, Seconds]:
    """Bytes that are kept, and seconds of recomputation without ops that are always recomputed."""
    size, seconds = measure
    return sum(map(size, liveness.kept)), sum([seconds(id(op)) for op in liveness.again if op.name not in NONE])

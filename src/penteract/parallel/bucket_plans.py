"""Which parameters share a bucket, on any rank: whole FSDP units, in the order in which backward finishes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penteract.config.mesh import Mesh
from penteract.config.optimizers import ADAMW, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import Policy, Role
from penteract.ops.params import Cut, OwningPpRanks, Param
from penteract.parallel.known_weights import KnownWeights, found_by_pass, known_weights

NONE = -1  # the unit of a bucket that does not belong to a single one
# A bucket ends within a unit where it holds so many times `bucket_bytes`: 1,000 MiB, where a layer of an 8B has 832.
SPLIT = 40


class BucketKey(NamedTuple):
    """What parameters of one bucket have in common."""

    cut: Cut
    owning_pp_ranks: tuple[int, ...]
    decay: bool
    moments: str
    delayed_weight_gradient: bool = False  # zero-bubble schedules may write its gradient in another, later action
    optimizer_kind: OptimizerKind = ADAMW
    gathered_as: Role = "parameter"


@dataclass(frozen=True, slots=True, eq=False)
class FsdpUnit:
    """An FSDP unit: parameters that are used together, in order of first use (the embedding, a layer, the head).

    `delayed_weight_gradients`: those whose gradients zero-bubble schedules may write in a later action. `shared`: those
    that other units use too, so they are not sharded by unit. `quantised_weights`: those that are gathered in FP8.
    `known_weights`: by product, those whose largest values are kept from one update to the next.
    """

    params: tuple[Param, ...]
    delayed_weight_gradients: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    quantised_weights: frozenset[str] = frozenset()
    known_weights: frozenset[tuple[str, ...]] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class BucketPlan:
    """Parameters that share a bucket, independent of the rank."""

    key: BucketKey
    params: tuple[Param, ...]
    offsets: tuple[int, ...]
    elements: int
    unit: int = NONE
    known_weights: tuple[KnownWeights, ...] = ()

    @property
    def shapes(self) -> tuple[object, ...]:
        """What decides the work on its matrices, besides their sharding; empty for an elementwise optimizer."""
        return _shapes(self.key, self.params)

    @property
    def kind(self) -> tuple[object, ...]:
        """All that decides what its bucket holds, and how it is reduced and updated."""
        passed = found_by_pass(self.known_weights, self.key.optimizer_kind)
        return self.key, self.elements, self.unit == NONE, self.shapes, passed

    def of(self, unit: int) -> BucketPlan:
        """The plan of the same parameters of another unit."""
        return BucketPlan(self.key, self.params, self.offsets, self.elements, unit, self.known_weights)

    def at(self, pp_rank: int) -> BucketPlan:
        """The plan of the same parameters on another pipeline rank; unchanged if several share them."""
        several = len(self.key.owning_pp_ranks) > 1
        return self if several else replace(self, key=self.key._replace(owning_pp_ranks=(pp_rank,)))


def _shapes(key: BucketKey, params: Iterable[Param]) -> tuple[object, ...]:
    return tuple((p.shape, p.shards) for p in params) if key.optimizer_kind.by_matrix else ()


def bucket_plans(rules: BucketRules, units: Sequence[FsdpUnit]) -> Iterator[BucketPlan]:
    """The units of a rank in forward order -> the parameters of each bucket, in the order in which backward finishes
    them.

    A bucket ends with a unit once it holds layout.bucket_bytes, and within one once it holds `SPLIT` times as much: one
    collective a layer takes less from the products beside it than several, but the last unit's waits for all of its
    backward. From ZeRO 2 on, a sharded bucket belongs to one unit; under ZeRO 3 a unit is not split, however large.
    Parameters on several pipeline ranks come last, in the order of their names, as a unit each: all these ranks must
    plan them alike and reduce them in the same order, whatever else they hold.
    """
    whole: list[list[Param]] = []
    late: list[Param] = []
    packed: dict[FsdpUnit, tuple[list[BucketPlan], list[Param], list[Param]]] = {}
    for number, unit in reversed(list(enumerate(units))):
        if unit not in packed:  # equal units may be one object
            rest = list(rules.not_per_unit(unit))
            own, shared = [[p for p in rest if bool(rules.sort_key(p)) is several] for several in (False, True)]
            packed[unit] = list(rules.of_unit(unit, number)), own, shared
        plans, own, shared = packed[unit]
        yield from [p.of(number) for p in plans]
        whole.append(own)
        late += shared
    open_: dict[BucketKey, Filling] = {}
    enough = rules.enough
    for together in [*whole, *([p] for p in sorted(late, key=rules.sort_key))]:
        yield from rules.fill(open_, together, rules.most)
        for key in [key for key, filling in open_.items() if filling.elements >= enough]:
            yield open_.pop(key).close()
    yield from (filling.close() for filling in open_.values())


def as_backward_finishes(params: Iterable[Param]) -> Iterator[Param]:
    """From the last used to the first. Joined ones, whose gradients one product makes, stay in their order."""
    runs: list[list[Param]] = []
    for p in params:
        if runs and runs[-1][-1].joined:
            runs[-1].append(p)
        else:
            runs.append([p])
    for run in reversed(runs):
        yield from run


_NO_UNIT = FsdpUnit(())


@dataclass(slots=True)
class Filling:
    """Collects parameters of one kind into one plan after another. `most`: elements with which a plan ends; None: no
    limit. `products`: as of `known_weights`."""

    key: BucketKey
    most: int | None
    unit: int = NONE
    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    params: list[Param] = field(default_factory=list[Param])
    ends: list[int] = field(default_factory=lambda: [0])  # offsets of all, and the end of the last

    @property
    def held(self) -> tuple[object, ...]:
        """All that decides how further parameters are packed."""
        return self.elements, _shapes(self.key, self.params), self._known()

    @property
    def elements(self) -> int:
        """Elements of the collected parameters on a rank."""
        return self.ends[-1]

    def add(self, p: Param, n: int) -> BucketPlan | None:
        """Add a parameter with `n` elements on a rank. -> the plan, if it now holds the most"""
        self.params.append(p)
        self.ends.append(self.ends[-1] + n)
        full = self.most is not None and self.elements >= self.most
        return self.close() if full and not p.joined else None

    def close(self) -> BucketPlan:
        """-> the collected parameters as a plan; the next plan begins empty"""
        offsets = tuple(self.ends[:-1])
        plan = BucketPlan(self.key, tuple(self.params), offsets, self.elements, self.unit, self._known())
        self.params, self.ends = [], [0]
        return plan

    def _known(self) -> tuple[KnownWeights, ...]:
        return known_weights(self.params, self.ends, self.products) if self.products else ()


@dataclass(slots=True)
class BucketRules:
    """Which parameters of a rank may share a plan, and how many do. `products`: as of `known_weights`."""

    owning_pp_ranks: OwningPpRanks
    mesh: Mesh
    policy: Policy
    optimizer_kinds: OptimizerKinds
    products: Mapping[str, tuple[str, ...]]
    cache: dict[tuple[int, bool, bool], tuple[BucketKey, int]] = field(
        default_factory=dict[tuple[int, bool, bool], tuple[BucketKey, int]]
    )  # by identity: equal layers may share their parameters

    @property
    def enough(self) -> int:
        """Elements with which a plan ends where a unit does."""
        return self.mesh.layout.bucket_bytes // self.policy.widths["gradient"]

    @property
    def most(self) -> int:
        """Elements with which a plan ends within a unit."""
        return SPLIT * self.enough

    def filling(self, key: BucketKey, most: int | None, unit: int = NONE) -> Filling:
        """An empty filling."""
        return Filling(key, most, unit, self.products)

    def not_per_unit(self, unit: FsdpUnit) -> Iterator[Param]:
        """The parameters that may share a bucket with other units, in the order in which backward finishes them."""
        return (p for p in as_backward_finishes(unit.params) if not self._cut(p, unit))

    def of_unit(self, unit: FsdpUnit, number: int) -> Iterator[BucketPlan]:
        """The bucket plans that belong to one unit; `number`: its number on the rank."""
        open_: dict[BucketKey, Filling] = {}
        own = [p for p in as_backward_finishes(unit.params) if self._cut(p, unit)]
        if not own:
            return
        yield from self.fill(open_, own, self.most if self.mesh.layout.zero == 2 else None, unit, number)
        yield from (filling.close() for filling in open_.values())

    def fill(
        self, open_: dict[BucketKey, Filling], params: Iterable[Param], most: int | None, unit: FsdpUnit = _NO_UNIT,
        number: int = NONE,
    ) -> Iterator[BucketPlan]:  # fmt: skip
        """Add parameters to the open plans of their kinds. -> the plans that now hold the most"""
        for p in params:
            key, n = self.kind(p, unit)
            filling = open_.get(key) or open_.setdefault(key, self.filling(key, most, number))
            if plan := filling.add(p, n):
                del open_[key]
                yield plan

    def sort_key(self, p: Param) -> str:
        """Of a parameter on several pipeline ranks, its place among those; of others, "": they come before."""
        return p.name if len(self.owning_pp_ranks[p.name]) > 1 else ""

    def kind(self, p: Param, unit: FsdpUnit = _NO_UNIT) -> tuple[BucketKey, int]:
        """-> the key of the buckets that it may be in, and its elements on a rank"""
        same = id(p), p.name in unit.delayed_weight_gradients, p.name in unit.quantised_weights
        if same not in self.cache:
            key = BucketKey(
                p.cut(self.mesh), self.owning_pp_ranks[p.name], p.decay, self.policy.moments_of(p.name),
                p.name in unit.delayed_weight_gradients,
                self.optimizer_kinds.of(matrix=p.matrix), "fp8" if p.name in unit.quantised_weights else "parameter",
            )  # fmt: skip
            self.cache[same] = key, p.numel(self.mesh)
        return self.cache[same]

    def _cut(self, p: Param, unit: FsdpUnit) -> bool:
        """Whether it is sharded with its unit."""
        return self.mesh.layout.cuts_units and p.name not in unit.shared and len(self.owning_pp_ranks[p.name]) == 1


def products(units: Iterable[FsdpUnit]) -> dict[str, tuple[str, ...]]:
    """The products of weights that are known, by weight."""
    return {name: product for unit in units for product in unit.known_weights for name in product}

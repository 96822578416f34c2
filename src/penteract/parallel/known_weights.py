"""Weights of a bucket whose largest absolute values are kept from one update to the next, for their casts to FP8.

The update's kernel finds them where it has all of a weight in whole tiles; else a pass over the weights follows.
Both the run and its price ask here which it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penteract.config.optimizers import OptimizerKind
from penteract.config.precision.policy import MOMENT_BLOCK
from penteract.ops.params import Param

TILE = 4 * MOMENT_BLOCK  # elements: a kernel finds the values of weights that begin and end at multiples of it


class KnownWeights(NamedTuple):
    """Weights of one product in a bucket, which share a value: they lie in a row.

    names    the weights; `value`: the first of the product, which names the value
    begin    the first of their elements in the bucket; `end`: the one after the last
    whole    whether all weights of the product are here: moments of several dtypes are in several buckets
    """

    names: tuple[str, ...]
    value: str
    begin: int
    end: int
    whole: bool


def known_weights(
    params: Sequence[Param], ends: Sequence[int], products: Mapping[str, tuple[str, ...]]
) -> tuple[KnownWeights, ...]:
    """Those among the parameters of a bucket. `ends`: the offset of each, and the end of the last; `products`: the
    names of the weights of its product, by weight. Layers that stand for others have their names, in rows of their
    own."""
    found = list[KnownWeights]()
    for i, p in enumerate(params):
        if (product := products.get(p.name)) is None:
            continue
        names, begin = (p.name,), ends[i]
        if found and found[-1].end == begin and found[-1].value == product[0] and p.name not in found[-1].names:
            last = found.pop()
            names, begin = (*last.names, p.name), last.begin
        found.append(KnownWeights(names, product[0], begin, ends[i + 1], len(names) == len(product)))
    return tuple(found)


def found_by_kernel(weights: Sequence[KnownWeights], optimizer_kind: OptimizerKind) -> bool:
    """Whether the kernel that updates a bucket finds the values of these weights, all that it has."""
    if not weights or optimizer_kind.by_matrix:
        return False
    return all(w.whole and w.begin % TILE == 0 and w.end % TILE == 0 for w in weights)


def found_by_pass(weights: Sequence[KnownWeights], optimizer_kind: OptimizerKind) -> int:
    """Elements that are read again after the update of a bucket to find their values."""
    return 0 if not weights or found_by_kernel(weights, optimizer_kind) else sum([w.end - w.begin for w in weights])

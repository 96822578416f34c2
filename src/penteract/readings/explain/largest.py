"""The largest parts of a price: its rows added up by what they are and the line that causes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from penteract.readings.explain.terms import Term, TermKind, Why

_OF_A_LAYER = 4  # names in "layers.*.norm1.weight", which is of no module of the layer


@dataclass(frozen=True, slots=True)
class SummedRows:
    """Rows that are alike: `value` is their sum, in bytes or FLOPs."""

    kind: TermKind
    name: str
    line: str
    value: int


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest `parts` of a `total`, and how many others there are."""

    total: int
    parts: tuple[SummedRows, ...]
    others: int

    @property
    def rest(self) -> int:
        """The sum of the others."""
        return self.total - sum(part.value for part in self.parts)


def largest(why: Why, kinds: Collection[TermKind], most: int) -> Largest:
    """The `most` largest parts of these kinds. Chunks of a stage have rows of their own, which differ in shape and in
    micro-batches in flight: here they are one. So are the matrices of a module, and the collectives of all parameters.
    """
    parameters = {row.what for row in why.rows if row.kind == "parameters"}
    sums = Counter[tuple[TermKind, str, str]]()
    for row in why.rows:
        if row.kind in kinds:
            sums[_same(row, parameters)] += row.value
    parts = [SummedRows(*key, value) for key, value in sums.most_common() if value]
    return Largest(sum(part.value for part in parts), tuple(parts[:most]), len(parts[most:]))


def _same(row: Term, parameters: Collection[str]) -> tuple[TermKind, str, str]:
    """What a row is, without shapes: its kind, its name, its line."""
    what, detail = row.what.partition(" [")[0], row.detail.partition("[")[0].strip()
    *how, last = detail.split(" ")
    if row.kind == "wires" and last in parameters:
        return row.kind, " ".join([what, *how, "parameters"]), ""
    path = row.what.split(".")
    if row.what in parameters and row.kind in ("parameters", "gradients", "optimizer") and len(path) > _OF_A_LAYER:
        return row.kind, ".".join([*path[:-2], "*"]), row.line.partition(":")[0]
    return row.kind, f"{what} {detail}".strip(), row.line

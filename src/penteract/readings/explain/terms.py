"""The rows of a price, as text and as JSON: each with its amount, its formula and its line of code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any, Literal, get_args

from penteract.ops.expression import LEGEND
from penteract.units import Bytes, show_bytes, show_flops

TermKind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "ring_buffer",
    "data",
    "kept",
    "temporary",
    "workspace",
    "host",
    "flops",
    "wires",
]

KINDS: tuple[TermKind, ...] = get_args(TermKind)
# The name under which a plan shows their sum, if it is another one.
PART_OF: Mapping[TermKind, str] = {
    "kept": "activations", "temporary": "activations", "ring_buffer": "other", "data": "other", "workspace": "other"
}  # fmt: skip
# The headings of rows that a plan does not show under the name of their kind.
_HEADINGS: Mapping[TermKind, str] = {
    "ring_buffer": "buffers of gathered parameters and of gradients", "data": "inputs",
    "kept": "activations saved for backward", "temporary": "temporary activations, peak",
    "workspace": "workspace of kernels, peak", "host": "host memory", "flops": "FLOPs per rank and step",
    "wires": "communication, bytes per rank and step",
}  # fmt: skip
_INDENT = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """`value` is `count · flight · each`, in bytes or FLOPs; `formula` is that of `each`, `numbers` has its values.

    `count`   how many layers or lines have the same row; `flight`: micro-batches in flight, of kept activations
    `detail`  a shape, a phase, a redistribution and its axis, or what needs the value later
    `names`   the names in the formula
    `ranks`   the group of a collective
    """

    kind: TermKind
    what: str
    detail: str
    formula: str
    numbers: str
    each: int
    count: int
    flight: int
    line: str
    names: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()

    @property
    def value(self) -> int:
        """Bytes or FLOPs of the whole row: count · flight · each."""
        return self.count * self.flight * self.each

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON, with its value. `ranks` is their number."""
        return {
            "kind": self.kind, "what": self.what, "detail": self.detail, "formula": self.formula,
            "numbers": self.numbers, "each": self.each, "count": self.count, "flight": self.flight,
            "value": self.value, "line": self.line, "ranks": len(self.ranks),
        }  # fmt: skip

    def lines(self, width: int) -> Iterator[str]:
        """Two lines, or more if they are long: what it is and its line of code; its formula, unless it is a number."""
        indent = " " * _INDENT
        amount = f"{_show(self.kind, self.value):>{_INDENT - 1}} "
        *above, name = wrap(f"{self.what} {self.detail}", width, initial_indent=amount, subsequent_indent=indent)
        yield from above
        if len(name) + len(self.line) >= width:
            yield name
            name = ""
        yield f"{name}{self.line:>{width - len(name)}}".rstrip()
        if self.formula == str(self.value):
            return
        times = f"{self.count} × " * (self.count > 1) + f"{self.flight} in flight × " * (self.flight > 1)
        same = "" if self.formula == self.numbers else f" = {times}{self.numbers}"
        yield from wrap(f"{times}{self.formula}{same}", width, initial_indent=indent, subsequent_indent=indent)


@dataclass(frozen=True, slots=True)
class Why:
    """All rows of one rank. `numbers`: the value of each name in their formulas."""

    rows: tuple[Term, ...]
    numbers: Mapping[str, int] = field(repr=False)

    def total(self, kind: TermKind) -> int:
        """The sum of all rows of one kind, in bytes or FLOPs."""
        return sum(r.value for r in self.rows if r.kind == kind)

    def whole(self, activations: Bytes, other: Bytes) -> Why:
        """Add the rest of a rank's `activations` and `other`, so that the rows cover all that it allocates.

        temporary  activations that are not saved: those of one action, and unused offsets of the arena
        workspace  the most that one kernel, or the update, allocates in addition to its registers
        """
        temporary = activations - self.total("kept")
        workspace = other - self.total("data") - self.total("ring_buffer")
        rest = (
            _rest("temporary", "within one forward or backward, with fragmentation", temporary),
            _rest("workspace", "of the largest kernel", workspace),
        )
        return replace(self, rows=(*self.rows, *(row for row in rest if row.each)))

    def text(self, kinds: Collection[TermKind] | None = None, width: int = 100) -> str:
        """The names in formulas; then the rows of `kinds` (all of them), the largest first, each with its formula, its
        numbers and its line."""
        used = {name for r in self.rows if kinds is None or r.kind in kinds for name in r.names}
        names = (f"{name} = {self.numbers[name]} {LEGEND[name]}" for name in LEGEND if name in used)
        whole = "; ".join(name.replace(" ", "\xa0").replace("-", "\u2011") for name in names)  # entries stay whole
        out = [*(line.replace("\xa0", " ").replace("\u2011", "-") for line in wrap(whole, width)), ""]
        for kind in KINDS if kinds is None else kinds:
            rows = sorted((r for r in self.rows if r.kind == kind), key=lambda r: -r.value)
            if rows:
                part = f" (part of {PART_OF[kind]})" if kind in PART_OF else ""
                out.append(f"{_HEADINGS.get(kind, kind)}  {_show(kind, self.total(kind))}{part}")
                out += [line for r in rows for line in r.lines(width)]
                out.append("")
        return "\n".join(out[:-1])

    def as_dict(self) -> dict[str, Any]:
        """The rows as JSON."""
        return {"numbers": dict(self.numbers), "rows": [r.as_dict() for r in self.rows]}


def _rest(kind: TermKind, detail: str, size: Bytes) -> Term:
    """A row without a formula: only its size."""
    return Term(kind=kind, what=kind, detail=detail, formula=str(size), numbers=str(size), each=size, count=1, flight=1,
               line="")  # fmt: skip


def _show(kind: TermKind, value: int) -> str:
    return show_flops(value) if kind == "flops" else show_bytes(value)

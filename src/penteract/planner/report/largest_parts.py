"""What takes most of a layout's memory, work and communication: a few lines of each, the largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penteract.planner.plan import Plan
from penteract.planner.report.memory_by_line import fullest_pp_rank, memory_by_line
from penteract.planner.search.best import Timed
from penteract.readings.explain.largest import Largest, SummedRows, largest
from penteract.readings.explain.terms import TermKind
from penteract.units import show_bytes, show_flops

_MEMORY: tuple[TermKind, ...] = (
    "parameters", "gradients", "optimizer", "ring_buffer", "data", "kept", "temporary", "workspace",
)  # fmt: skip
_OWNER: Mapping[TermKind, str] = {
    "kept": "activations",
    "temporary": "activations",
    "ring_buffer": "buffers",
    "data": "inputs",
}
_MOST = {"memory": 8, "flops": 5, "wires": 5}


def largest_parts(plan: Plan, timed: Timed, width: int = 100) -> str:
    """The largest parts of the memory of a layout's fullest GPU, of its FLOPs and of the bytes that it sends and
    receives: amount, share of the whole, what it is, and the line of code that causes it."""
    rows, pp = memory_by_line(plan, timed), timed.layout.pp
    one = plan.ask.devices()
    where = f"the fullest {one}, of pipeline rank {fullest_pp_rank(timed)}" if pp > 1 else f"a {one}"
    memory = largest(rows, _MEMORY, _MOST["memory"])
    flops, wires = largest(rows, ("flops",), _MOST["flops"]), largest(rows, ("wires",), _MOST["wires"])
    sections = [
        _section(f"What takes the memory of {where}", memory, show_bytes, width),
        _section("What it computes in a step", flops, show_flops, width),
        _section("What it sends and receives in a step, hidden beside compute or not", wires, show_bytes, width),
    ]
    return "\n\n".join(filter(None, sections))


def _section(title: str, found: Largest, show: Callable[[int], str], width: int) -> str:
    if not found.total:
        return ""
    amounts = [show(part.value) for part in found.parts]
    column = max(map(len, amounts))
    lines = [f"{title}: {show(found.total)}, the largest first"]
    for part, amount in zip(found.parts, amounts, strict=True):
        lines += _row(f"  {amount:>{column}} {part.value / found.total:>5.1%}  {_name(part)}", part.line, width)
    if found.others:
        others = f"{found.others} smaller {'one' if found.others == 1 else 'ones'}"
        lines.append(f"  {show(found.rest):>{column}} {found.rest / found.total:>5.1%}  {others}")
    return "\n".join(lines)


def _row(text: str, line: str, width: int) -> Iterator[str]:
    """The line of code at the right, or below a long name."""
    if len(text) + len(line) + 2 > width:
        yield text
        text = ""
    yield f"{text}{line:>{width - len(text)}}".rstrip()


def _name(part: SummedRows) -> str:
    owner = "" if part.kind in ("flops", "wires", "workspace") else _OWNER.get(part.kind, part.kind)
    return f"{owner}: {part.name}" if owner else part.name

"""What the Bench view asks, checked; what it leaves open, chosen: the axes that vary first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penteract.errors import BadInput
from penteract.explore.measured_sweeps.case_table import CaseTable
from penteract.explore.schemas.bench_schema import BenchOptions

NONE = "none"
ROWS = 100  # of the table, at first
_TEXTS = (
    "sweep",
    "rows",
    "columns",
    "panels",
    "colour",
    "across",
    "up",
    "predicted",
    "measured",
    "group",
    "find",
    "sort",
)
_LONGEST, _MOST = 400, 200  # letters of a text; values of a filter
_PANELS = 12
# What heat maps are made of, if it varies: rows, columns and panels in this order.
_FIRST = ("dp", "tp", "pp", "cp", "ep", "zero", "zero_stage", "micro_batch_size", "mbs")
_SIZES = ("ranks", "gpus", "nodes", "world", "world_size")
_ORDER = ("rows", "columns", "panels")


def checked(given: object) -> BenchOptions:
    """The options as they were asked, each of its type. Raises BadInput."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _wrong("bench", "no object", "options")
    tree = cast("dict[str, Any]", given)
    allowed = (*_TEXTS, "file", "only", "descending", "first")
    if unknown := [key for key in tree if key not in allowed]:
        raise _wrong("bench", unknown[0], ", ".join(allowed))
    for name in _TEXTS:
        if name in tree and (not isinstance(tree[name], str) or len(tree[name]) > _LONGEST):
            raise _wrong(f"bench.{name}", tree[name], f"a text of at most {_LONGEST} letters")
    only: Any = tree.get("only", {})
    if not isinstance(only, dict) or not all(map(_is_filter, cast("dict[str, Any]", only).values())):
        raise _wrong("bench.only", "other values", "lists of texts")
    if not isinstance(tree.get("descending", False), bool):
        raise _wrong("bench.descending", tree["descending"], "true or false")
    first = tree.get("first", ROWS)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise _wrong("bench.first", first, "a number of rows")
    _check_file(tree.get("file"))
    return cast("BenchOptions", tree)


def _check_file(file: object) -> None:
    if file is None:
        return
    tree = cast("dict[str, Any]", file) if isinstance(file, dict) else {}
    if not isinstance(tree.get("name"), str) or not isinstance(tree.get("text", ""), str) or {*tree} - {"name", "text"}:
        raise _wrong("bench.file", "another value", "a name, and a text")


def _is_filter(values: Any) -> bool:
    some = cast("list[Any]", values) if isinstance(values, list) else []
    return 0 < len(some) <= _MOST and all(isinstance(v, str) and len(v) <= _LONGEST for v in some)


def _wrong(where: str, found: object, allowed: str) -> BadInput:
    return BadInput("QUESTION", "not what the Bench view asks", where=where, found=str(found)[:40], allowed=allowed)


def settled(table: CaseTable, asked: BenchOptions) -> BenchOptions:
    """The options with every choice made: what the table does not have is chosen anew."""
    numbers = [column.name for column in table.columns.values() if column.kind]
    grid = [column.name for column in table.columns.values() if column.grid]
    found: BenchOptions = {**asked, **_mesh(table, asked, grid)}
    by = {
        "colour": (numbers, (table.rate, table.mfu, table.step, *numbers)),
        "across": (numbers, (table.memory, table.step, *numbers)),
        "up": (numbers, (table.rate, table.mfu, *numbers)),
        "sort": ([*table.columns], (table.rate, *table.columns)),
    }
    for name, (allowed, wishes) in by.items():
        value = cast("str", asked.get(name, ""))
        found[name] = value if value in allowed else next(filter(None, wishes), "")
    if "across" not in asked and found.get("across") == found.get("up"):
        found["across"] = next((name for name in numbers if name != found.get("up")), found.get("up", ""))
    if asked.get("sort") not in table.columns:
        found["descending"] = bool(table.rate)
    found["predicted"], found["measured"] = _pair(table, asked, numbers)
    found["only"] = {field: texts for field, texts in asked.get("only", {}).items() if field in table.columns}
    found["first"] = asked.get("first", ROWS)
    return found


def _mesh(table: CaseTable, asked: BenchOptions, grid: Sequence[str]) -> BenchOptions:
    """Rows, columns and panels: those that are asked for; for others the first that vary, and that are free."""
    found = dict[str, str]()
    for name in _ORDER:
        value = cast("str", asked.get(name, ""))
        if value == NONE or (value in grid and value not in found.values()):
            found[name] = value
    held = {*asked.get("only", {})}
    others = sorted(grid, key=lambda name: name in _SIZES)  # the sizes last: they follow from the degrees
    wishes = [name for name in (*_FIRST, *others) if name in grid and name not in held]
    for name in _ORDER:
        free = [w for w in wishes if w not in found.values() and (name != "panels" or _is_few(table, w))]
        if name not in found:
            found[name] = free[0] if free and (name != "panels" or free[0] in _FIRST) else NONE
    return cast("BenchOptions", found)


def _is_few(table: CaseTable, name: str) -> bool:
    return len(table.columns[name].distinct) <= _PANELS


def pairs(table: CaseTable) -> Mapping[str, str]:
    """predicted column -> measured column, where both have numbers: step time first, then memory."""
    first = ("predicted_step_s", "predicted_allocated_bytes")
    names = [*first, *(name for name in table.columns if "predicted" in name and name not in first)]
    return {
        name: measured
        for name in names
        if (measured := _measured(name)) in table.columns
        and name in table.columns and table.columns[name].kind and table.columns[measured].kind
    }  # fmt: skip


def _measured(predicted: str) -> str:
    """The column of the measurement of a predicted one: ours, or one beside it in an object."""
    ours = predicted.removeprefix("predicted_")
    return ours if ours != predicted else predicted.replace("predicted", "measured")


def _pair(table: CaseTable, asked: BenchOptions, numbers: Sequence[str]) -> tuple[str, str]:
    """The numbers whose residuals are shown: any two of a kind; else the first pair that there is."""
    given = asked.get("predicted", ""), asked.get("measured", "")
    if given[0] in numbers and given[1] in numbers:
        a, b = (table.columns[name].kind for name in given)
        if a and b and a.of == b.of:
            return given
    if found := pairs(table):
        return next(iter(found.items()))
    predicted = [name for name in numbers if table.columns[name].source == "predicted"]
    for name in predicted:  # of others: the first measured number of the same kind
        for other in numbers:
            kinds = table.columns[name].kind, table.columns[other].kind
            if other not in predicted and kinds[0] and kinds[1] and kinds[0].of == kinds[1].of != "":
                return name, other
    return "", ""

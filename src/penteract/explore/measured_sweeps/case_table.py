"""Cases as a table of columns: of a sweep as `penteract bench show --csv` writes it, or of a file of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Literal

from penteract.explore.measured_sweeps.scales import KINDS, NumberKind, kind_of
from penteract.measure.results.ranking import CaseNumbers
from penteract.units import printable

Source = Literal["setting", "predicted", "measured", "published"]
DEGREES = ("dp", "tp", "pp", "cp", "ep")
LONGEST = 200  # letters of a text
_OWN = ("case", "state", "model", "ranks")  # how a line of ours begins
# Columns of ours: their labels. A predicted one has that of the measured one.
_LABELS: Mapping[str, str] = {
    "tokens_per_s_per_gpu": "Tokens/s/GPU", "step_s": "Step time", "mfu": "MFU", "mfu_causal": "MFU, causal",
    "spread": "Spread of steps", "steps": "Timed steps", "allocated_bytes": "Memory allocated",
    "reserved_bytes": "Memory reserved", "device_bytes": "Memory in use on the device", "gpu_seconds": "GPU-seconds",
    "loss_first": "First loss", "loss_last": "Last loss", "loss_falls": "Loss falls", "void": "Void",
    "imbalance": "Rows of the fullest rank's experts, over even ones",
    "global_batch_size": "Batch, sequences", "sequence_length": "Sequence length", "micro_batch_size": "Micro-batch",
    "zero": "ZeRO", "zero_stage": "ZeRO", "error": "Error", "device": "Device", "commit": "Commit", "ended": "Ended",
    "case": "Case", "state": "State", "model": "Model", "ranks": "Ranks", "layout": "Layout", "precision": "Precision",
}  # fmt: skip
_MEASURED = {*_LABELS} - {"global_batch_size", "sequence_length", "micro_batch_size", "zero", "zero_stage", "case",
                          "state", "model", "ranks", "layout", "precision"}  # fmt: skip
_STATES: Mapping[str, str] = {  # words of others
    "completed": "done", "ok": "done", "success": "done", "finished": "done", "complete": "done", "fail": "failed",
    "error": "failed", "crashed": "failed", "oom": "out of memory", "out_of_memory": "out of memory",
    "timeout": "timed out", "timed_out": "timed out",
}  # fmt: skip
_YES_OR_NO: Mapping[str, str] = {"true": "yes", "false": "no"}
_SOURCES: Mapping[str, Source] = {
    r"(^|[_.])pred(icted)?([_.]|$)": "predicted", r"(^|[_.])measured([_.]|$)": "measured",
}  # fmt: skip
_COUNTS = (KINDS["number"], KINDS["cost"])
_FEW = 8  # numbers that are not whole: with more, a column is a result
_RATE = r"tok(en)?s?_?(per|/)_?s\w*(per|/)_?(gpu|device|rank)"


@dataclass(frozen=True, kw_only=True)
class CaseColumn:
    """A column. `values`: a number or a text of each case; None: not known. `kind`: of numbers; None: it has texts."""

    name: str
    label: str
    source: Source
    values: Sequence[float | str | None]
    kind: NumberKind | None

    @property
    def unit(self) -> str:
        """Of its numbers; empty where the label has it, or there is none."""
        return self.kind.unit if self.kind and self.kind.unit not in ("tokens/s", "bytes") else ""

    def text(self, case: int) -> str:
        """A value, to read; empty: not known."""
        return self._texts[self.values[case]]

    @cached_property
    def _texts(self) -> Mapping[float | str | None, str]:
        """Of each value its text."""
        found = dict[float | str | None, str]()
        for value in {*self.values}:
            found[value] = (
                self.kind.show(value) if self.kind and not isinstance(value, str | None) else str(value or "")
            )
        return found

    def number(self, case: int) -> float | None:
        """A value that is a number."""
        value = self.values[case]
        return None if isinstance(value, str) else value

    @cached_property
    def distinct(self) -> list[float | str]:
        """The values that occur, in order."""
        found = {value for value in self.values if value is not None}
        return sorted(found, key=lambda v: (isinstance(v, str), v))  # type: ignore[arg-type]

    @property
    def grid(self) -> bool:
        """Whether it can be the rows or columns of a heat map."""
        return 1 < len(self.distinct) <= _GRID and self.source == "setting" and self.name not in _NAMING


_GRID = 40  # rows or columns of a heat map, at most
_NAMING = ("case", "name", "layout", "state", "status")  # these tell what a case is, or became
_TEXTS = (*_NAMING, "commit", "error", "void")  # also where they look like numbers: 007


@dataclass(frozen=True, kw_only=True)
class CaseTable:
    """Cases. `own`: written by penteract; else the columns are guessed by their names.

    states, whys  of each case; `good`: whether its speed counts
    rate, memory, mfu, step  names of the columns with these; empty: there is none
    """

    title: str
    own: bool
    columns: Mapping[str, CaseColumn]
    names: Sequence[str]
    states: Sequence[str]
    whys: Sequence[str]
    good: Sequence[bool]
    rate: str = ""
    memory: str = ""
    mfu: str = ""
    step: str = ""
    command: str = ""
    notes: Sequence[str] = field(default=())

    def value(self, name: str, case: int) -> float | None:
        """A number of a case by the name of its column; None: there is none."""
        return self.columns[name].number(case) if name in self.columns else None

    def numbers(self, case: int) -> CaseNumbers:
        """What is ranked of a case that counts."""
        own = {name: self.value(name, case) for name in ("allocated_bytes", "predicted_tokens_per_s_per_gpu",
                                                         "predicted_step_s", "predicted_allocated_bytes")}  # fmt: skip
        return CaseNumbers(
            name=str(case), rate=self.value(self.rate, case) or 0.0, step_s=self.value(self.step, case),
            spread=self.value("spread", case) or 0.0, allocated_bytes=own["allocated_bytes"],
            predicted_rate=own["predicted_tokens_per_s_per_gpu"], predicted_step_s=own["predicted_step_s"],
            predicted_allocated_bytes=own["predicted_allocated_bytes"],
        )  # fmt: skip


def table_of(
    rows: Sequence[Mapping[str, Any]], title: str, *, command: str = "", notes: Sequence[str] = ()
) -> CaseTable:
    """A table of flat rows, column -> value. Texts of files may be anything."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    own = tuple(names[: len(_OWN)]) == _OWN
    columns = {name: _column(name, [row.get(name) for row in rows], own=own) for name in names}
    columns = {name: column for name, column in columns.items() if column.distinct}
    rate, memory, mfu, step = (
        _first(columns, *letters)
        for letters in ((_RATE, r"tok(en)?s?_?(per|/)_?s"), (r"^device_bytes$", r"^allocated_bytes$", r"mem"),
                        (r"^mfu$", r"(^|_)mfu(_|$)"), (r"^step_s$", r"step_?time|step_(s|ms)$|(^|_)time"))
    )  # fmt: skip
    state = _first(columns, r"^(state|status)$", numbers=False)
    states = [_state(columns[state].text(i)) if state else "done" for i in range(len(rows))]
    void = columns.get("void")
    counts = rate or mfu or step
    good = [
        states[i] == "done" and not (void and void.text(i)) and (not counts or columns[counts].number(i) is not None)
        for i in range(len(rows))
    ]
    return CaseTable(
        title=printable(title, LONGEST), own=own, columns=columns, names=_names(columns, len(rows), own=own),
        states=states, whys=[_why(columns, i) for i in range(len(rows))], good=good, rate=rate, memory=memory, mfu=mfu,
        step=step, command=command, notes=notes,
    )  # fmt: skip


def _column(name: str, values: list[Any], *, own: bool) -> CaseColumn:
    """A column; it has numbers if all of its values are."""
    read = [_value(value) for value in values]
    numbers = [value for value in read if value is not None and not isinstance(value, str)]
    if len(numbers) < sum(value is not None for value in read) or not numbers or name in _TEXTS:
        kind = None
        read = [None if value is None else printable(value if isinstance(value, str) else str(raw).strip(), LONGEST)
                for value, raw in zip(read, values, strict=True)]  # fmt: skip
    else:
        kind = kind_of(name, max(numbers))
    base = name.removeprefix("predicted_")
    label = _LABELS.get(base) or _label(base, kind)
    if base != name:
        return CaseColumn(name=name, label=f"{label}, predicted", source="predicted", values=read, kind=kind)
    return CaseColumn(name=name, label=label, source=_source(name, kind, read, own=own), values=read, kind=kind)


def _label(name: str, kind: NumberKind | None) -> str:
    """The name of a column as words, without the unit that its values have."""
    words = [word for word in re.split(r"[_.]", name) if word]
    units = {"GiB": ("gib",), "GB": ("gb",), "MiB": ("mib",), "bytes": ("bytes",), "%": ("pct", "percent"),
             "s": ("s", "sec", "seconds"), "ms": ("ms",)}  # fmt: skip
    without = [word for word in words if kind is None or word.lower() not in units.get(kind.unit, ())]
    return printable(" ".join(without or words), 60)


def _source(name: str, kind: NumberKind | None, values: Sequence[float | str | None], *, own: bool) -> Source:
    """Where a column comes from. Of files of others, quantities are results; counts, words and few numbers settings."""
    if own:
        return "measured" if name in _MEASURED else "setting"
    for letters, source in _SOURCES.items():
        if re.search(letters, name.lower()):
            return source
    fine = {value for value in values if not isinstance(value, str) and value is not None and value % 1}
    return "published" if kind is not None and (kind not in _COUNTS or len(fine) > _FEW) else "setting"


def _value(raw: Any) -> float | str | None:
    """A value of a file: a finite number, a text, or None for nothing."""
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw) if abs(raw) < 1e300 and isfinite(raw) else None
    if raw is None or not (text := str(raw).strip()):
        return None
    if text.lower() in _YES_OR_NO:
        return _YES_OR_NO[text.lower()]
    try:
        number = float(text) if "_" not in text else float("nan")
    except ValueError:
        return text
    return number if isfinite(number) else (None if text.lower() in ("nan", "inf", "-inf") else text)


def _first(columns: Mapping[str, CaseColumn], *letters: str, numbers: bool = True) -> str:
    """The first column whose name has the letters, by the first of them that any has; no predicted one."""
    for one in letters:
        for name, column in columns.items():
            if (column.kind is not None) == numbers and column.source != "predicted" and re.search(one, name.lower()):
                return name
    return ""


def _state(text: str) -> str:
    low = text.lower()
    return _STATES.get(low, low) or "pending"


def _why(columns: Mapping[str, CaseColumn], case: int) -> str:
    found = [columns[name].text(case) for name in ("error", "void") if name in columns]
    return next(filter(None, found), "")


def _names(columns: Mapping[str, CaseColumn], count: int, *, own: bool) -> list[str]:
    """What cases are called: as the table says, else by the settings in which they differ."""
    if own or "case" in columns or "name" in columns:
        column = columns.get("case") or columns["name"]
        return [column.text(i) or f"case {i + 1}" for i in range(count)]
    some = [column for column in columns.values() if _short(column)]
    text: Callable[[int], str] = lambda i: " ".join(f"{_short(c)}={c.text(i)}" for c in some if c.text(i))  # noqa: E731
    return [text(i) or f"case {i + 1}" for i in range(count)]


def _short(column: CaseColumn) -> str:
    """The short name of a part of a layout; empty: it is none, or all cases have the same."""
    short = {"micro_batch_size": "mbs", "zero_stage": "zero", "zero": "zero", "nodes": "nodes", "model_label": "model",
             "model": "model"}  # fmt: skip
    found = column.name if column.name in DEGREES else short.get(column.name, "")
    return found if len(column.distinct) > 1 else ""

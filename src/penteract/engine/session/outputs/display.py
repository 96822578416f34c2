"""The progress of a training run: a live table on a terminal, at most 20 lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penteract.units import GIB, show_bytes, show_count, show_path, show_seconds

ROWS = 12  # of the live table
LINES = 20  # lines for a whole run where there is no terminal
_RECENT = 20  # steps whose median time predicts the time left

_UNKNOWN = "-"


class LiveTable:
    """Progress of a run of `total_steps`, fed with the rows of `metrics.jsonl`.

    On a terminal: a table of the last steps, redrawn a few times a second.  Elsewhere: a line every 1/LINES of the run.
    quiet: print the last line alone.  json: print to standard error; standard output is the caller's.
    """

    def __init__(
        self, total_steps: int, layout: str, *, quiet: bool = False, json: bool = False, console: Console | None = None
    ) -> None:
        self._total, self._layout, self._quiet = total_steps, layout, quiet
        self._console = console or Console(file=sys.stderr if json else sys.stdout)
        self._rows: tuple[dict[str, str], ...] = ()
        self._times: tuple[float, ...] = ()
        drawn = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet and not json
        # A thread draws the table, so a step only makes one row.
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4) if drawn else None

    def step(self, row: Mapping[str, object]) -> None:
        """Show one row of metrics. Its `step` counts from 1."""
        if self._quiet:
            return
        cells = self._cells(row)
        first, self._rows = not self._rows, (*self._rows, cells)[-ROWS:]
        if self._live is not None:
            if first:
                self._live.start()
        elif first or self._due(int(cells["step"])):
            self._print(self._line(cells, headed=first))

    def close(self) -> None:
        """Stop drawing and restore the terminal; may be called twice."""
        if self._live is not None:
            self._live.stop()

    def finish(self, loss_first: float, loss_last: float, seconds: float, folder: Path) -> None:
        """Close, and print the last line: first and last loss, the seconds spent training, and the run's folder."""
        self.close()
        self._print(f"loss {loss_first:.3f} -> {loss_last:.3f} in {seconds:.1f} s of training · {show_path(folder)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)  # never wrapped: other programs read it

    def _due(self, step: int) -> bool:
        """Whether `step` completes another 1/LINES of the run, or the run."""
        return step >= self._total or step * LINES // self._total > (step - 1) * LINES // self._total

    def _cells(self, row: Mapping[str, object]) -> dict[str, str]:
        step, took, validation = _number(row, "step"), _number(row, "perf/step_time_s"), _number(row, "val/loss")
        if took is not None:
            self._times = (*self._times, took)[-_RECENT:]
        left = max(0, self._total - int(step or 0))
        return {
            "step": str(int(step or 0)),
            "loss": _shown(_number(row, "train/loss"), ".3f"),
            "val loss": "" if validation is None else f"{validation:.3f}",
            "learning rate": _shown(_number(row, "train/lr"), ".2e"),
            "tokens/s": _UNKNOWN if (rate := _number(row, "perf/tokens_per_sec")) is None else show_count(rate),
            "predicted": _memory(_number(row, "mem/predicted_gib")),
            "measured": _memory(_number(row, "mem/measured_gib")),
            "time left": show_seconds(left * median(self._times)) if self._times else _UNKNOWN,
        }

    def _table(self) -> Table:
        # `_rows` is replaced, never mutated: the drawing thread always sees a complete tuple.
        rows = self._rows
        table = Table(
            title=Text(f"{self._layout} · {self._total} steps"), title_justify="left", box=SIMPLE_HEAD, show_edge=False,
            padding=(0, 1, 0, 0), pad_edge=False,
        )  # fmt: skip
        for name in rows[-1] if rows else ("step",):
            table.add_column(f"memory {name}" if name in ("predicted", "measured") else name, justify="right")
        for cells in rows:
            table.add_row(*cells.values())
        return table

    def _line(self, cells: dict[str, str], *, headed: bool) -> str:
        validation = f" (validation {cells['val loss']})" if cells["val loss"] else ""
        later = cells["measured"] == _UNKNOWN and headed and int(cells["step"]) < self._total
        measured = f"measured from step {int(cells['step']) + 1} on" if later else f"{cells['measured']} measured"
        head = f"{self._layout}\n" if headed and self._layout else ""
        return head + (
            f"step {cells['step']:>{len(str(self._total))}}/{self._total}  loss {cells['loss']}{validation}"
            f"  learning rate {cells['learning rate']}  {cells['tokens/s']} tokens/s"
            f"  memory {cells['predicted']} predicted, {measured}  {cells['time left']} left"
        )


def _number(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return value if isinstance(value, (int, float)) else None


def _shown(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _memory(gib: float | None) -> str:
    return _UNKNOWN if gib is None else show_bytes(round(gib * GIB))

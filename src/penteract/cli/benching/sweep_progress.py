"""A sweep while it runs: a live table on a terminal, else a line for each case that ends; and requests to stop."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from penteract.cli.benching.sweep_tables import counts, device, left, progress, state, why
from penteract.measure.schemas.sweep import Sweep, SweepRow
from penteract.units import show_whole

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_OTHERS = 6  # lines of a terminal that the table leaves


class SweepProgress:
    """Called with the sweep as it is. On the terminal it is drawn over itself; elsewhere each change is a line on
    stderr. `live`: whether there is a terminal."""

    def __init__(self, *, live: bool, quiet: bool = False) -> None:
        self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False) if live else None
        self._quiet, self._seen, self._begun = quiet, dict[str, str](), time.monotonic()
        self._before: int | None = None  # cases that were over at the first call

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if self._live:
            self._live.stop()

    def __call__(self, sweep: Sweep) -> None:
        """Show it."""
        if self._before is None:
            self._before = sum(row.status.over for row in sweep.rows)
        if self._live:
            rest = left(sweep, time.monotonic() - self._begun, self._before)
            line = " · ".join(filter(None, (counts(sweep), rest)))
            lines = shutil.get_terminal_size().lines
            self._live.update(Group(progress(sweep, lines - _OTHERS), Text(line, no_wrap=True)), refresh=True)
        elif not self._quiet:
            self._lines(sweep)

    def _lines(self, sweep: Sweep) -> None:
        first = not self._seen
        for row in sweep.rows:
            now = f"{row.status.state} {row.status.attempt}"
            if self._seen.get(row.case.name) != now and not first and row.status.state != "pending":
                over = sum(other.status.over for other in sweep.rows)
                print(f"{over}/{len(sweep.rows)} {row.case.name}: {_said(row, sweep)}", file=sys.stderr, flush=True)
            self._seen[row.case.name] = now


def _said(row: SweepRow, sweep: Sweep) -> str:
    if row.result is None:
        return ": ".join(filter(None, (state(row.status), why(row.status))))
    measured = row.result.measured
    void = f", void: {measured.void}" if measured.void else ""
    return f"{row.status.state}, {show_whole(measured.tokens_per_s_per_gpu)} tokens/s/{device(sweep.settings)}{void}"


class StopRequests:
    """Within the context, SIGINT, SIGTERM and SIGHUP are requests to stop; called, it says whether there was one. A
    second one interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before = dict[int, Any]()

    def __call__(self) -> bool:
        """Whether there was a request."""
        return self.asked

    def __enter__(self) -> Self:
        for name in _SIGNALS:
            with suppress(ValueError, AttributeError):  # not the main thread, or no such signal here
                number = int(getattr(signal, name))
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *about: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

"""The progress of a search that takes long: a live line on a terminal, lines ever farther apart elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from penteract.planner.ask import as_text
from penteract.planner.search.progress import Progress
from penteract.units import show_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

AFTER = 2.0  # seconds before a search shows its progress
FIRST_LINE = 10.0  # seconds before its first line where there is no terminal; each later one takes twice as long


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """Shows the progress from `AFTER` seconds on, and clears its line at the end. Unless it is `shown`, `log` gets a
    line of it, first after `FIRST_LINE` seconds."""

    def __init__(
        self,
        *,
        shown: bool,
        console: Console | None = None,
        clock: Callable[[], float] = perf_counter,
        log: TextIO | None = None,
    ) -> None:
        self._shown, self._console, self._clock, self._log = shown, console, clock, log
        self._next_line = FIRST_LINE
        self._began, self._live = clock(), None

    def __call__(self, progress: Progress) -> None:
        """Show the progress of a search."""
        passed = self._clock() - self._began
        if self._log is not None and not self._shown and passed >= self._next_line:
            self._next_line = 2 * passed
            print(sentence(progress), file=self._log, flush=True)
        if self._shown and passed >= AFTER:
            from rich.text import Text

            live = self._live = self._live or self._start()
            live.update(Text(sentence(progress), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _start(self) -> Live:
        from rich.console import Console  # imported here: most plans are ready sooner
        from rich.live import Live

        live = Live(console=self._console or Console(stderr=True), transient=True, auto_refresh=False)
        live.start()
        return live

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def sentence(progress: Progress) -> str:
    """The progress of a search, in one line."""
    priced, left = map(show_whole, (progress.priced, progress.left))
    counts = f"{progress.seconds:.0f} s · {priced} layouts priced, {left} left"
    if progress.best is None:
        return f"{counts} · Ctrl-C stops"
    layout = progress.best.layout
    text = as_text(layout, usual=layout)
    best = f"best so far {progress.best.time.seconds:.3g} s a step: {text}"
    return f"{counts} · {best} · Ctrl-C stops and prints it"


def on_a_terminal() -> bool:
    """Whether both standard output and standard error are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def terminal_width() -> int | None:
    """The columns of the terminal; None if the output goes elsewhere, where a line stays a line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

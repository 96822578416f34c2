"""A rank's watch over its own main thread: it needs no other rank, and finds a hang sooner than the limit of a phase.

The limit of a step is for any model. Once some steps have been timed, a rank that makes no progress for as long as many
of them hangs. A rank that waits in a collective is not judged here: others know whom it waits for (`blame.py`).
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.hangs.blame import Verdict
from penteract.engine.runtime.hangs.record import Record
from penteract.errors import PeerLost

_DEBUGGERS = ("pydevd", "debugpy")  # modules of debuggers that trace by other means than a frame's trace function
_STATUS = Path("/proc/self/status")
# A terminal that stands still (Ctrl-S, a pager) stops who writes to it, and nothing is wrong.
_PRINTS = frozenset({("session", "display.py"), ("runtime", "printing.py"), ("logging", "__init__.py")})


class OwnWatch:
    """`alone`: no other rank watches this one, so phases without steps are judged too, by their limits."""

    def __init__(self, progress: RankProgress, rank: int, *, alone: bool) -> None:
        self.progress, self.rank, self.alone = progress, rank, alone
        self._excused = 0.0  # seconds without progress that do not count: a debugger held the rank, or its terminal

    def tick(self, own: Record) -> Verdict | None:
        """What to end the run with; `own`: this rank's record of the same tick."""
        if own.idle <= 0:
            self._excused = 0.0
        bound = self.progress.bound(alone=self.alone)
        if own.phase == "done" or own.waits is not None or own.idle - self._excused < bound:
            return None
        if held_by_debugger() or prints():
            self._excused = own.idle
            return None
        usual = self.progress.median_step
        usual_step = f", and a step takes {usual:.3g} s" if usual is not None else ""
        what = (f"rank {self.rank} (host {own.host}) hangs: its main thread has made no progress for {own.idle:.0f} s"
                f"{usual_step}; rank {self.rank} is in {own.where()}")  # fmt: skip
        return Verdict("HUNG", (self.rank,), what)


def hung_row(verdict: Verdict, own: Record, run_dir: Path, threads: str) -> dict[str, Any]:
    """The row of errors.jsonl; `threads`, the stack of every thread, goes there and to a file of its own."""
    path = run_dir / rundir.LOGS / f"stacks-{verdict.ranks[0]:05d}.txt"
    shown = str(path)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(threads)
    except OSError:
        shown = str(run_dir / rundir.ERRORS)
    error = PeerLost(verdict.code, verdict.what, where=str(run_dir),
                     fix=f"{shown} has the stack of every thread; --limits.{own.limited_by} waits longer; --resume "
                     "continues from the last checkpoint")  # fmt: skip
    rank = verdict.ranks[0]
    row = rundir.error_row(error, rank, noticed_by=rank, culprits=list(verdict.ranks))
    return row | {"host": own.host, "traceback": threads}


def held_by_debugger() -> bool:
    """Whether a debugger may be what holds the main thread: Python's own, an editor's, or one of the system's."""
    if any(name in sys.modules for name in _DEBUGGERS) or _traced_by_system():
        return True
    return any(frame.f_trace is not None or Path(frame.f_code.co_filename).name in ("bdb.py", "pdb.py")
               for frame in _main_frames())  # fmt: skip


def prints() -> bool:
    """Whether the main thread is printing."""
    return any(Path(frame.f_code.co_filename).parts[-2:] in _PRINTS for frame in _main_frames())


def stacks() -> str:
    """The stack of every thread, the main thread's first."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(frames, key=lambda ident: (ident != main, names.get(ident, "")))
    parts = [f"thread {names.get(i, i)}:\n{''.join(traceback.format_stack(frames[i]))}" for i in order]
    return "\n".join(parts)


def _main_frames() -> Iterator[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traced_by_system() -> bool:
    """Whether a process traces this one, as gdb and strace do."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)

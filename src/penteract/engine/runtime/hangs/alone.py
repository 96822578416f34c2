"""The watch of a run of one rank: there is no other rank that could miss it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank_progress import RankProgress
from penteract.engine.rank.stopping import SHOW_CURSOR
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.hangs.own_watch import OwnWatch, hung_row, stacks
from penteract.engine.runtime.hangs.record import Own
from penteract.errors import PeerLost, PenteractError, Preempted

LAST_S = 3.0  # for what is written at the end: the disk may be what hangs


class AloneWatch:
    """Looks twice a second how far the main thread is, from `start` to `stop`; ends the process with 72 if it hangs.

    `final` is called with the exit code, `parting` last. `launcher_reports`: a launcher prints what errors.jsonl says.
    """

    def __init__(
        self, progress: RankProgress, run_dir: Path, final: Callable[[int], None] = lambda code: None,
        parting: Callable[[], None] = lambda: None, *,
        launcher_reports: bool = False, interval: float = 0.5,
    ) -> None:  # fmt: skip
        self.progress, self.run_dir, self.final, self.parting = progress, run_dir, final, parting
        self.launcher_reports, self.interval = launcher_reports, interval
        # A GPU is not asked how far it is: its host waits for each step, and events would cost every action.
        self._own = Own(progress, socket.gethostname(), asks_device=False)
        self._watch = OwnWatch(progress, 0, alone=True)
        self._over = threading.Event()
        self._earlier = rundir.errors_size(run_dir)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._look, name="watch-alone", daemon=True).start()

    def stop(self) -> None:
        """The run has ended by itself."""
        self._over.set()

    def _look(self) -> None:
        tick, last = 0, time.monotonic()
        while not self._over.wait(self.interval):
            now = time.monotonic()
            # Cap the time of one tick: if the process was suspended, it does not hang.
            passed, last = min(now - last, 2 * self.interval), now
            tick += 1
            if (verdict := self._watch.tick(own := self._own.next(tick, passed))) is not None:
                return self._end(hung_row(verdict, own, self.run_dir, stacks()))
        return None

    def _end(self, row: dict[str, object]) -> None:
        words = threading.Thread(target=self._last_words, args=[row], daemon=True)
        words.start()
        words.join(LAST_S)
        os._exit(PeerLost.exit_code)

    def _last_words(self, row: dict[str, object]) -> None:
        rundir.append_error(self.run_dir, row)
        if not (self.launcher_reports and rundir.errors(self.run_dir, self._earlier)):
            with suppress(OSError):  # the main thread may be inside of `sys.stderr`, and hold its lock
                os.write(2, f"{rundir.error_line(row)}\n".encode())
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
        with suppress(OSError):
            rundir.write_status(self.run_dir, rundir.ended(PeerLost.exit_code), exit_code=PeerLost.exit_code)
        self.final(PeerLost.exit_code)
        self.parting()


def error_alone(e: BaseException, run_dir: Path) -> PenteractError:
    """The error with which the only rank ends; its row is in errors.jsonl."""
    if isinstance(e, KeyboardInterrupt):
        e = Preempted("STOPPED", "interrupted before a step was saved", where=str(run_dir))
    error = from_exception(e)
    rundir.append_error(run_dir, rundir.error_row(error, 0, e))
    return error

"""Launch ranks as child processes on this host, watch them, and end them together. Imports no torch."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from penteract.config import cgroup
from penteract.engine.rank.stopping import Phase, Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.runtime.deaths import death
from penteract.engine.runtime.prepared import PreparedRanks
from penteract.engine.runtime.rank_environment import environments, start_rank, store_socket
from penteract.errors import Bug, OutOfMemory, PeerLost, Preempted

GRACE_S = 15.0  # after one rank has failed, for the others to end: their watchers need at most ten
SAVE_S = 600.0  # after the first request to stop, for a checkpoint
KILL_S = 3.0  # from SIGTERM to SIGKILL
POLL_S = 0.05
_TO_KILL = 3  # the request at which ranks are killed
_RESUME = "--resume continues from the last checkpoint"
_IF_SAVED = f"{_RESUME}, if there is one"


def launch(
    world: int, words: Sequence[str], folder: Path, environment: Mapping[str, str],
    explain: Callable[[str], str] = lambda line: line, again: str | None = None,
    prepared: PreparedRanks | None = None,
) -> int:  # fmt: skip
    """Run `python WORDS` as `world` ranks; returns the exit code of the first rank that failed, or 0.

    Rank 0 prints to this terminal; the others write to folder/logs. Requests to stop are passed on: ranks save and
    stop at the first, and end at once at the second; the third kills them. After a rank fails, the others have GRACE_S
    to end by themselves. The error of the rank that failed first is printed on stderr, here alone: ranks write theirs
    to errors.jsonl. No rank outlives this process. `explain`: what is printed where a rank had no memory left.
    `again`: how to go on, where no checkpoint is what does. `prepared`: ranks that wait for orders; they end here if
    they are not those of this run.
    """
    earlier = rundir.errors_size(folder)
    ranks = _Ranks(folder, killed_before=cgroup.memory_kills())
    with Stopping.of_process() as stopping:
        stopping.enter(Phase.LAUNCHING)
        try:
            if not ranks.adopt(prepared, world, words, environment):
                ranks.start_all(world, words, environment)
            ranks.wait(stopping)
        finally:
            ranks.end()
            if prepared is not None:
                prepared.complete_logs()
        silent = ranks.stopped_by_signals()
    code, line = _outcome(ranks, rundir.errors(folder, earlier))
    if ranks.signals_sent and (code > 128 or (code == Preempted.exit_code and 0 in silent)):
        line = line or f"{Preempted('STOPPED', 'stopped before it could save', where=str(folder), fix=_IF_SAVED)}"
        code = Preempted.exit_code
    if line:
        line = explain(line) if code == OutOfMemory.exit_code else line
        line = line if again is None else line.replace(_IF_SAVED, again).replace(_RESUME, again)
        print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        rundir.write_status(folder, rundir.ended(code), exit_code=code)
    return code


@dataclass(slots=True)
class _Ranks:
    """The child processes, the order in which they ended, and the signals passed on to them."""

    folder: Path
    killed_before: int | None = None  # processes killed for memory before the ranks started
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    logs: list[IO[bytes]] = field(default_factory=list[IO[bytes]])
    ended: dict[int, int] = field(default_factory=dict[int, int])  # rank -> exit code, in the order in which they ended
    killed: set[int] = field(default_factory=set[int])  # ranks that did not end by themselves
    signal: int = 0  # the first signal received
    signals_sent: int = 0  # requests to stop that were passed on

    def adopt(
        self, prepared: PreparedRanks | None, world: int, words: Sequence[str], environment: Mapping[str, str]
    ) -> bool:
        """Give orders to ranks that wait for them; False if there are none for this run."""
        if prepared is None:
            return False
        with prepared:
            if not prepared.fits(world, words, environment):
                return False
            if world > 1:
                self.log(1).parent.mkdir(parents=True, exist_ok=True)
            for r in range(world):
                self.processes.append(prepared.order(r, words[2:], self.log(r) if r else None))
        return True

    def start_all(self, world: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python WORDS` as each rank."""
        with store_socket() as store:
            own, *others = environments(environment, world, store)
            number = store.fileno()
            self.processes.append(start_rank([*words, f"--store-fd={number}"], own, None, number))
        for r, other in enumerate(others, 1):
            self.log(r).parent.mkdir(parents=True, exist_ok=True)
            self.logs.append(self.log(r).open("ab"))
            self.processes.append(start_rank(words, other, self.logs[-1]))

    def log(self, rank: int) -> Path:
        return self.folder / rundir.LOGS / f"rank-{rank:05d}.log"

    def wait(self, stopping: Stopping) -> None:
        """Wait for all ranks, and pass requests to stop on. After a failure or a request the rest have GRACE_S or
        SAVE_S to end by themselves."""
        deadline: float | None = None
        failed = False
        while self._alive():
            while self.signals_sent < stopping.requests:
                self._pass_on(stopping.signal)
            if not failed and (any(self.ended.values())):
                failed, deadline = True, time.monotonic() + GRACE_S
            elif deadline is None and self.signals_sent:
                deadline = time.monotonic() + SAVE_S
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def _pass_on(self, number: int) -> None:
        """Ask the ranks to stop. They save at the first request and end at once at the second, unless they hang."""
        self.signal = self.signal or number
        self.signals_sent += 1
        for p in self.processes:
            if p.poll() is None:
                p.send_signal(signal.SIGTERM if self.signals_sent < _TO_KILL else signal.SIGKILL)

    def stopped_by_signals(self) -> set[int]:
        """Ranks that a request ended before they could answer it: their interpreter had hardly begun. From now on they
        count as stopped."""
        silent = {r for r, code in self.ended.items() if code == -signal.SIGTERM} if self.signals_sent else set[int]()
        self.ended |= dict.fromkeys(silent, Preempted.exit_code)
        return silent

    def end(self) -> None:
        """End the ranks that still run: after a request by SIGTERM, then by SIGKILL. Where nobody asked them to stop,
        SIGTERM would look as if somebody had: a rank that still joins would say so."""
        self.killed |= set(self._alive())
        for kill in (False, True) if self.signals_sent else (True,):
            for r in self._alive():
                self.processes[r].kill() if kill else self.processes[r].terminate()
            deadline = time.monotonic() + KILL_S
            while self._alive() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for log in self.logs:
            log.close()

    def _alive(self) -> list[int]:
        """Ranks that still run. Records those that have ended; of several at once, those killed by a signal first."""
        news = {r: c for r, p in enumerate(self.processes) if r not in self.ended and (c := p.poll()) is not None}
        self.ended |= dict(sorted(news.items(), key=lambda rc: rc[1] >= 0))
        return [r for r in range(len(self.processes)) if r not in self.ended]


def _outcome(ranks: _Ranks, rows: list[dict[str, Any]]) -> tuple[int, str]:
    """(exit code, error line) of the rank that caused the failure. The line is empty if rank 0 has printed it here,
    which it does only where it could not write to errors.jsonl.

    That rank is the first that wrote an error of its own to errors.jsonl; else the first that ended neither because of
    another rank's failure nor because this process killed it.
    """
    if not any(ranks.ended.values()):
        return 0, ""
    if own := next((row for row in rows if row["exit_code"] != PeerLost.exit_code), None):
        return int(own["exit_code"]), rundir.error_line(own)
    culprits = [r for r, c in ranks.ended.items() if c not in (0, PeerLost.exit_code) and r not in ranks.killed]
    if ranks.signals_sent and all(ranks.ended[r] < 0 for r in culprits):
        error = Preempted("STOPPED", "stopped before it could save", where=str(ranks.folder),
                          fix=_IF_SAVED)  # fmt: skip
        return 128 + ranks.signal, str(error)
    if not culprits:  # every failed rank lost a peer
        return PeerLost.exit_code, rundir.error_line(rows[0]) if rows else ""
    # If rank 0 ended so too, it has printed the error on this terminal.
    same = 0 not in ranks.killed and ranks.ended.get(0) == ranks.ended[culprits[0]]
    return _without_row(ranks, 0 if same else culprits[0])


def _without_row(ranks: _Ranks, rank: int) -> tuple[int, str]:
    """(exit code, error line) for a rank that ended without a row in errors.jsonl."""
    code, log = ranks.ended[rank], ranks.log(rank)
    where = f"its log: {log}" if rank else str(ranks.folder)
    if code < 0:
        now, before = cgroup.memory_kills(), ranks.killed_before
        error = death(rank, -code, where, None if now is None or before is None else now - before)
        rundir.append_error(ranks.folder, rundir.error_row(error, rank))
        return error.exit_code, str(error)
    line = _last_error(log) if rank else ""
    if line or (rank == 0 and code != 1):  # an error before the ranks had joined
        return code, line
    bug = Bug("RANK", f"rank {rank} ended with exit code {code}", where=where, fix="see what it printed last")
    return bug.exit_code, str(bug)


def _last_error(log: Path) -> str:
    """The last line of a log that starts with `error[`."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error[")), "")
    return ""

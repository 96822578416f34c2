"""Ranks of our own on this host: started together, watched together, ended together. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from penteract.engine.runtime.cpu_affinity import threads_of
from penteract.engine.session import rundir
from penteract.errors import Bug, PeerLost, Preempted

GRACE_S = 15.0  # for the others after one rank has failed: their watchers need at most ten
SAVE_S = 600.0  # for a checkpoint after the first Ctrl-C or SIGTERM
KILL_S = 3.0  # from SIGTERM to SIGKILL
POLL_S = 0.05


def launch(world: int, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run `python WORDS` as `world` ranks; returns the exit code of the one that decided.

    Rank 0 has this terminal; the others write to folder/logs. The first Ctrl-C or SIGTERM is passed on, so that ranks
    save and stop; the second ends them. After a rank fails the others have GRACE_S to leave by themselves. What the
    culprit said is on stderr once. No rank outlives this process.
    """
    earlier = rundir.errors_size(folder)
    port = _free_port()
    ranks = _Ranks(folder)
    with ranks.signals():
        try:
            for r in range(world):
                ranks.start(r, [sys.executable, *words], rank_environment(environment, r, world, port))
            ranks.wait()
        finally:
            ranks.end()
    code, line = _verdict(ranks, rundir.errors(folder, earlier))
    if line:
        print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        rundir.write_status(folder, rundir.ended(code), exit_code=code)
    return code


def rank_environment(given: Mapping[str, str], rank: int, world: int, port: int) -> dict[str, str]:
    """What a rank is told; what the user has set stays as it is."""
    # Threads wait asleep, after a glance of some microseconds: without it waking them costs as much as a second thread
    # gives, and with more the ranks of a crowded host keep each other from working.
    ours = {"OMP_NUM_THREADS": str(threads_of(world)), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "30000"}
    ours |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return ours | dict(given) | {name: str(value) for name, value in place.items()}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _bound_to_parent() -> Callable[[], None]:
    """What a child does first: on Linux the kernel ends it when its parent ends, however that happens."""
    parent = os.getpid()
    prctl: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before the fork

    def bind() -> None:
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # it had ended before
                os._exit(PeerLost.exit_code)

    return bind


@dataclass(slots=True)
class _Ranks:
    """The children, in the order in which they end, and what is asked of them."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    logs: list[IO[bytes]] = field(default_factory=list[IO[bytes]])
    ended: dict[int, int] = field(default_factory=dict[int, int])  # rank -> exit code, the first to end first
    given_up: set[int] = field(default_factory=set[int])  # ranks that had to be ended from here
    signal: int = 0  # the first that came
    asked: int = 0  # signals passed on so far

    def start(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        out: Any = None
        if rank:
            self.log(rank).parent.mkdir(parents=True, exist_ok=True)
            out = self.log(rank).open("ab")
            self.logs.append(out)
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            process_group=0, preexec_fn=_bound_to_parent(),  # its own group: a terminal's Ctrl-C comes from us, once
        )  # fmt: skip
        self.processes.append(process)

    def log(self, rank: int) -> Path:
        return self.folder / rundir.LOGS / f"rank-{rank:05d}.log"

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass signals on: politely once, then for good."""

        def handle(number: int, frame: object) -> None:
            self.signal = self.signal or number
            self.asked += 1
            for p in self.processes:
                if p.poll() is None:
                    p.send_signal(signal.SIGTERM if self.asked == 1 else signal.SIGKILL)

        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def wait(self) -> None:
        """Until all are done; after a failure, or when asked to stop, the rest have a while to leave by themselves."""
        deadline: float | None = None
        failed = False
        while self._alive():
            if not failed and (any(self.ended.values())):
                failed, deadline = True, time.monotonic() + GRACE_S
            elif deadline is None and self.asked:
                deadline = time.monotonic() + SAVE_S
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def end(self) -> None:
        """No rank stays."""
        self.given_up |= set(self._alive())
        for kill in (False, True):
            for r in self._alive():
                self.processes[r].kill() if kill else self.processes[r].terminate()
            deadline = time.monotonic() + KILL_S
            while self._alive() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for log in self.logs:
            log.close()

    def _alive(self) -> list[int]:
        """Ranks that still run; notes which have ended, of several at once those first that a signal ended."""
        news = {r: c for r, p in enumerate(self.processes) if r not in self.ended and (c := p.poll()) is not None}
        self.ended |= dict(sorted(news.items(), key=lambda rc: rc[1] >= 0))
        return [r for r in range(len(self.processes)) if r not in self.ended]


def _verdict(ranks: _Ranks, rows: list[dict[str, Any]]) -> tuple[int, str]:
    """The culprit's exit code, and its line unless rank 0 has said it on this terminal.

    The culprit is the first that wrote its own error; else the first that ended by something that is no answer to
    another's failure, nor to us.
    """
    if not any(ranks.ended.values()):
        return 0, ""
    if own := next((row for row in rows if row["exit_code"] != PeerLost.exit_code), None):
        return int(own["exit_code"]), "" if _rank0_printed(own, ranks, rows) else rundir.told(own)
    culprits = [r for r, c in ranks.ended.items() if c not in (0, PeerLost.exit_code) and r not in ranks.given_up]
    if ranks.asked and all(ranks.ended[r] < 0 for r in culprits):
        error = Preempted("STOPPED", "stopped before it could save", where=str(ranks.folder),
                          fix="--resume goes on from the last checkpoint, if there is one")  # fmt: skip
        return 128 + ranks.signal, str(error)
    if not culprits:  # peers that lost one another
        rank0_told = ranks.ended.get(0) == PeerLost.exit_code
        return PeerLost.exit_code, "" if rank0_told or not rows else rundir.told(rows[0])
    alike = ranks.ended.get(0) == ranks.ended[culprits[0]]  # then rank 0 has said it on this terminal
    return _untold(ranks, 0 if alike else culprits[0])


def _rank0_printed(own: dict[str, Any], ranks: _Ranks, rows: list[dict[str, Any]]) -> bool:
    """Whether rank 0 has printed what `own` says: as its own error, or as the one that all ranks failed with alike.

    Of an error that several ranks fail with only the first to tell the others writes a row; the rest print it.
    """
    ended = ranks.ended.get(0)
    if own["rank"] == 0:
        return ended != PeerLost.exit_code
    return ended == own["exit_code"] and all(row["rank"] != 0 for row in rows)


def _untold(ranks: _Ranks, rank: int) -> tuple[int, str]:
    """A rank that ended without a row in errors.jsonl."""
    code, log = ranks.ended[rank], ranks.log(rank)
    where = f"its log: {log}" if rank else str(ranks.folder)
    if code < 0:
        fix = "SIGKILL is often a host out of memory; --resume goes on from the last checkpoint"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        error = PeerLost("LOST", f"rank {rank} was ended by {name}", where=where, fix=fix)
        return PeerLost.exit_code, str(error)
    said = _last_error(log) if rank else ""
    if said or (rank == 0 and code != 1):  # an error that came before the ranks knew of each other
        return code, said
    bug = Bug("RANK", f"rank {rank} ended with exit code {code}", where=where, fix="see what it printed last")
    return bug.exit_code, str(bug)


def _last_error(log: Path) -> str:
    """The last line of a log that is an error of ours."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error[")), "")
    return ""

"""Ranks of our own on this host: started together, watched together, ended together. Imports no torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

GRACE_S = 15.0  # for the others after one rank has failed: the watcher needs at most ten
SAVE_S = 600.0  # for a checkpoint after Ctrl-C
PEER = 72  # the exit code of a rank that left because of another
PREEMPTED = 75  # of one that saved and stopped, and said so


def launch(world: int, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run `python WORDS` as `world` ranks; returns the exit code of the one that decided.

    Rank 0 has this terminal; the others write to folder/logs. The first Ctrl-C or SIGTERM is passed on, so that ranks
    save and stop; the second ends them. No rank outlives this process.
    """
    port = _free_port()
    ranks = _Ranks(folder)
    with ranks.signals():
        try:
            for r in range(world):
                ranks.start(r, [sys.executable, *words], _environment(environment, r, world, port))
            ranks.wait()
        finally:
            ranks.end()
    return ranks.verdict()


def _environment(given: Mapping[str, str], rank: int, world: int, port: int) -> dict[str, str]:
    """What a rank is told; what the user has set stays as it is."""
    threads = max(1, (os.cpu_count() or 1) // world)
    ours = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return ours | dict(given) | {name: str(value) for name, value in place.items()}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _die_with_parent() -> None:
    """Linux: the kernel ends this child when its parent ends, however that happens. And its signals come from us alone."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass(slots=True)
class _Ranks:
    """The children, and what is asked of them."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    logs: list[IO[bytes]] = field(default_factory=list[IO[bytes]])
    asked: int = 0  # signals passed on so far

    def start(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        out: Any = None
        if rank:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            out = (self.folder / "logs" / f"rank-{rank:05d}.log").open("ab")
            self.logs.append(out)
        preexec = _die_with_parent if os.name == "posix" else None
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=preexec
        )
        self.processes.append(process)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass signals on: politely once, then for good."""

        def handle(number: int, frame: object) -> None:
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
        """Until all are done; after a failure the rest have a moment to leave by themselves."""
        deadline: float | None = None
        while any(p.poll() is None for p in self.processes):
            failed = any(p.poll() not in (None, 0) for p in self.processes)
            if deadline is None and (failed or self.asked):
                deadline = time.monotonic() + (GRACE_S if failed else SAVE_S)
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def end(self) -> None:
        """No rank stays."""
        for kill in (False, True):
            for p in self.processes:
                if p.poll() is None:
                    p.kill() if kill else p.terminate()
            deadline = time.monotonic() + 3
            while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
                time.sleep(0.02)
        for log in self.logs:
            log.close()

    def verdict(self) -> int:
        """The culprit's exit code: of the first rank that told its error, else of the first that is no bystander."""
        codes = [p.returncode for p in self.processes]
        if not any(codes):
            return 0
        told = _first_error(self.folder / "errors.jsonl")
        if told is not None:
            if int(told["rank"]) and codes[0] in (0, PEER):  # else rank 0 has said it on this terminal
                print(told["line"], file=sys.stderr)
            return int(told["exit_code"])
        rank = next((r for r, c in enumerate(codes) if c not in (0, PEER)), 0)
        code = codes[rank]
        if code not in (PREEMPTED, PEER):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            log = f" · its log: {self.folder / 'logs' / f'rank-{rank:05d}.log'}" if rank else ""
            print(f"error[RANK]: rank {rank} ended by {how}{log}", file=sys.stderr)
        return code if code > 0 else 128 - code


def _first_error(path: Path) -> dict[str, Any] | None:
    """The first whole line of errors.jsonl that is not about a peer."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if told.get("exit_code") != PEER:
            return told
    return None

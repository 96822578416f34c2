"""Ranks that start before they know what to do: they import what every run needs, which takes seconds, while the
command still resolves and plans it. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.device.early_libraries import FLAG
from penteract.engine.runtime.rank_environment import environments, start_rank, store_socket
from penteract.errors import PeerLost

WORKER = "penteract.engine.runtime.worker"
ORDERS = "--orders="


@dataclass(slots=True)
class PreparedRanks:
    """The processes of a run's ranks on this host, rank 0 first, and the socket of their store."""

    environment: Mapping[str, str]  # of the command
    store: socket.socket
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    pipes: list[int] = field(default_factory=list[int])  # what orders are written to
    # What ranks but the first print into until they have a log; and the logs that follow.
    said: list[IO[bytes] | None] = field(default_factory=list["IO[bytes] | None"])
    logs: list[tuple[IO[bytes], Path]] = field(default_factory=list[tuple["IO[bytes]", Path]])
    ordered: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])

    @staticmethod
    def of(world: int, environment: Mapping[str, str], *, gpus: bool = False) -> PreparedRanks | None:
        """Start them; None where that gains nothing: without torch, or if there are more of them than cores. `gpus`:
        they will use GPUs, if there are any."""
        if world > usable_here() or find_spec("torch") is None:
            return None
        made = PreparedRanks(dict(environment), store_socket())
        try:
            for rank, own in enumerate(environments(environment, world, made.store)):
                made._start(rank, own, [FLAG] * gpus)
        except OSError:  # such as a limit on processes: the run's own start says so
            made.__exit__()
            return None
        return made

    def _start(self, rank: int, environment: dict[str, str], more: list[str]) -> None:
        read, write = os.pipe()
        self.pipes.append(write)
        try:
            said = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115 (open until the rank has a log)
            self.said.append(said)
            inherited = (read,) if rank else (read, self.store.fileno())
            self.processes.append(start_rank(["-m", WORKER, f"{ORDERS}{read}", *more], environment, said, *inherited))
        finally:
            os.close(read)

    def fits(self, world: int, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether all of them live, and are those of `python WORDS` with this environment."""
        same = len(self.processes) == world and list(words[:2]) == ["-m", WORKER]
        return same and self.environment == environment and all(p.poll() is None for p in self.processes)

    def order(self, rank: int, words: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
        """Let a rank do what `python -m WORKER WORDS` would. It prints into `log`, or where it prints already. Raises
        OSError if the log cannot be written."""
        said = self.said[rank]
        if log is not None and said is not None:
            log.open("ab").close()
            self.logs.append((said, log))
        words = [*words, *([] if rank else [f"--store-fd={self.store.fileno()}"])]
        with suppress(BrokenPipeError):  # it has ended: whoever waits for it sees that
            os.write(self.pipes[rank], json.dumps({"words": words, "log": log and str(log)}).encode() + b"\n")
        self.ordered.append(self.processes[rank])
        return self.processes[rank]

    def __enter__(self) -> PreparedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep nothing but the processes that have their orders; others are killed."""
        for pipe in self.pipes:
            os.close(pipe)
        for process in self.processes:
            if process not in self.ordered:
                process.kill()
                process.wait()
        for said in self.said:
            if said is not None and all(said is not one for one, _ in self.logs):
                said.close()
        self.processes, self.pipes, self.said = [], [], []
        self.store.close()

    def complete_logs(self) -> None:
        """Write what ranks said that ended before they read their orders into their logs, once all have ended."""
        for said, log in self.logs:
            with said, suppress(OSError):
                if not log.stat().st_size:
                    said.seek(0)
                    log.write_bytes(said.read())
        self.logs = []


def orders(word: str) -> list[str]:
    """In a rank: wait for its orders, the words of its command line. Ends the process if there will be none."""
    with os.fdopen(int(word.removeprefix(ORDERS))) as pipe:
        line = pipe.readline()
    if not line:
        sys.exit(PeerLost.exit_code)
    given = json.loads(line)
    if given["log"] is not None:
        with open(given["log"], "ab") as log:
            os.lseek(1, 0, os.SEEK_SET)
            with open(1, "rb", closefd=False) as said:
                log.write(said.read())
            log.flush()
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
    return given["words"]

"""Ranks that start before they know what to do: they import what every run needs, which takes seconds, while the
command still resolves and plans it. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.rank.run_key import VARIABLE, new_key
from penteract.engine.runtime.rank_environment import bound_to_parent, rank_environment, store_socket
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
    ordered: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])

    @staticmethod
    def of(world: int, environment: Mapping[str, str]) -> PreparedRanks | None:
        """Start them; None where that gains nothing: without torch, or if there are more of them than cores."""
        if world > usable_here() or find_spec("torch") is None:
            return None
        made = PreparedRanks(dict(environment), store_socket())
        place = rank_environment(environment, 0, world, made.store.getsockname()[1]) | {VARIABLE: new_key()}
        for rank in range(world):
            made._start(rank, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        return made

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        read, write = os.pipe()
        out = subprocess.DEVNULL if rank else None  # its log is not known yet
        words = [sys.executable, "-m", WORKER, f"{ORDERS}{read}"]
        inherited = (read,) if rank else (read, self.store.fileno())
        process = subprocess.Popen(
            words, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, pass_fds=inherited,
            process_group=0, preexec_fn=bound_to_parent(),
        )  # fmt: skip
        os.close(read)
        self.processes.append(process)
        self.pipes.append(write)

    def fits(self, world: int, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether all of them live, and are those of `python WORDS` with this environment."""
        same = len(self.processes) == world and list(words[:2]) == ["-m", WORKER]
        return same and self.environment == environment and all(p.poll() is None for p in self.processes)

    def order(self, rank: int, words: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
        """Let a rank do what `python -m WORKER WORDS` would. It prints into `log`, or where it prints already."""
        words = [*words, *([] if rank else [f"--store-fd={self.store.fileno()}"])]
        with suppress(BrokenPipeError):  # it has ended: whoever waits for it sees that
            os.write(self.pipes[rank], json.dumps({"words": words, "log": log and str(log)}).encode() + b"\n")
        self.ordered.append(self.processes[rank])
        return self.processes[rank]

    def __enter__(self) -> PreparedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep nothing but the processes that have their orders; others are killed."""
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            os.close(pipe)
            if process not in self.ordered:
                process.kill()
                process.wait()
        self.processes, self.pipes = [], []
        self.store.close()


def orders(word: str) -> list[str]:
    """In a rank: wait for its orders, the words of its command line. Ends the process if there will be none."""
    with os.fdopen(int(word.removeprefix(ORDERS))) as pipe:
        line = pipe.readline()
    if not line:
        sys.exit(PeerLost.exit_code)
    given = json.loads(line)
    if given["log"] is not None:
        with open(given["log"], "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    return given["words"]

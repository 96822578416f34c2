"""The process that writes a rank's checkpoints while the rank trains. It has no torch, and ends with its rank.

It serves one request at a time: `describe` what lies where in the snapshot, `write` the rank's files, and on rank 0
`commit` and `tidy`. Requests and answers are lines of JSON on a socket; what is long lies in memory beside it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penteract.engine.checkpoint import durable as disk
from penteract.engine.checkpoint import folder, rank_file
from penteract.engine.checkpoint.background.kept_forms import KeptState, Levels, numbers
from penteract.engine.checkpoint.background.shared_memory import SharedMemory, as_buffer
from penteract.engine.checkpoint.packing import LARGEST_FILE, FileEntry
from penteract.engine.checkpoint.rank_file import RankTable
from penteract.errors import Bug, DiskFailure, PenteractError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # they are for the rank
_NICE = 5  # training comes first
_LOOK_S = 60.0  # for another host's file: a network's file system shows it late


class Service:
    """What the requests of one rank share: its snapshot, and what lies where in it."""

    def __init__(self, snapshot: SharedMemory, payload: SharedMemory) -> None:
        self.snapshot, self.payload = snapshot, payload
        self.rank, self.threads, self.entries = 0, 1, list[FileEntry]()
        self.largest = LARGEST_FILE

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. `length`: bytes of its payload, or of the answer's."""
        given = self.payload.get(int(request.get("length", 0)))
        try:
            found = getattr(self, f"_{request['do']}")(request, given).encode()
        except PenteractError as e:
            return {"error": {"kind": type(e).__name__, **e.as_dict()}}
        except Exception as e:
            traceback.print_exc()
            error = Bug("BUG", f"{type(e).__name__}: {e}", where="the writer of checkpoints")
            return {"error": {"kind": "Bug", **error.as_dict()}}
        self.payload.put(found)
        return {"length": len(found)}

    def _describe(self, request: Mapping[str, Any], given: bytes) -> str:
        content = json.loads(given)
        levels: Levels = {signed == "true": values for signed, values in content["levels"].items()}
        self.rank, self.threads, self.largest = (int(content[name]) for name in ("rank", "threads", "largest"))
        memory = as_buffer(self.snapshot)

        def entry(row: list[Any]) -> FileEntry:
            name, shape, offset, size, dtype, kept = row
            state = None if kept is None else KeptState(*kept)
            return FileEntry(
                name, tuple(shape), (tuple(offset), tuple(size)), dtype, state is not None,
                lambda begin, end: () if state is None else numbers(memory, state, dtype, name, levels, begin, end),
            )  # fmt: skip

        self.entries = [entry(row) for row in content["entries"]]
        return ""

    def _write(self, request: Mapping[str, Any], given: bytes) -> str:
        fresh = Path(request["fresh"])
        with disk.failing(fresh, "write a checkpoint"):
            return rank_file.write(fresh, self.entries, self.rank, self.threads, self.largest).text()

    def _commit(self, request: Mapping[str, Any], given: bytes) -> str:
        at, step, epoch = Path(request["folder"]), request["step"], request["epoch"]
        fresh = folder.unfinished(at, step, epoch)
        extra, *texts = given.split(b"\n")
        tables = [RankTable.parse(text) for text in texts]
        with disk.failing(fresh, "commit a checkpoint"):
            _await_files(fresh, tables)
            rank_file.finish(fresh, step, json.loads(extra), tables)
            folder.commit(at, step, epoch)
        return ""

    def _tidy(self, request: Mapping[str, Any], given: bytes) -> str:
        at = Path(request["folder"])
        if request["proven"]:
            with disk.failing(at / request["proven"], "mark a checkpoint as proven"):
                folder.prove(at / request["proven"])
        with disk.failing(at, "remove older checkpoints"):
            folder.prune(at, request["keep"], request["epoch"])
        return ""


def _await_files(fresh: Path, tables: list[RankTable]) -> None:
    """Wait until each rank's files are seen with their sizes. Raises DiskFailure."""
    until = time.monotonic() + _LOOK_S
    for rank, (name, size) in ((rank, file) for rank, table in enumerate(tables) for file in table.files.items()):
        path = fresh / name
        # Where the folder is gone, another process has taken the run over: what comes next fails.
        while fresh.is_dir() and (found := _size(path)) != size:
            if time.monotonic() > until:
                raise DiskFailure("DISK", f"rank 0 does not see a file of rank {rank}", where=str(path),
                                  found=f"{found} bytes", allowed=f"{size} bytes",
                                  fix="choose an --output.folder that all hosts share")  # fmt: skip
            time.sleep(0.2)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends. The end of its socket does the same, a moment later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def serve(connection: socket.socket, service: Service) -> None:
    """Answer requests until the rank has none any more, or is gone, which is no error of this process."""
    with suppress(ConnectionError), connection, connection.makefile("r") as lines:
        for line in lines:
            connection.sendall(json.dumps(service.answer(json.loads(line))).encode() + b"\n")


def main(words: list[str]) -> int:
    """Serve the rank that started this process: its id, the socket, and both memories with the size of the first."""
    parent, connection, snapshot, size, payload = map(int, words)
    end_with(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    gc.disable()  # ranks' tables are lists by the million, and none is in a cycle: looking for some takes half the time
    serve(socket.socket(fileno=connection), Service(SharedMemory(snapshot, size), SharedMemory(payload)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`penteract train` in a process of its own, until a step is told of."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

UNSAVED = ("--training.sample_tokens=0", "--training.validation_every=0")


class TrainRun:
    """One run until its step `last` is told of, or it ends.

    at    seconds from the start to each step that was told of
    code  its exit code; None if it was stopped after its last step: a checkpoint would take longer than all this
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        last: int,
        *,
        limit: float,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Run it; it is killed after `limit` seconds."""
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.at, self.lines = folder / "latest", dict[int, float](), list[str]()
        self.code: int | None = None
        command = [sys.executable, "-m", "penteract", "train", *words, *UNSAVED, f"--output.folder={folder}"]
        begun = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        ) as process:  # fmt: skip
            alarm = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
            alarm.start()
            try:
                for line in process.stdout or ():
                    self.lines.append(line.rstrip())
                    if found := re.match(r"step (\d+)/", line):
                        self.at[int(found[1])] = time.monotonic() - begun
                        if int(found[1]) >= last:
                            break
                else:
                    self.code = process.wait()
            finally:
                alarm.cancel()
                if process.poll() is None:  # it has its steps, or this process is to end: it would stay on the GPU
                    os.killpg(process.pid, signal.SIGKILL)
        self.took = time.monotonic() - begun
        until = time.monotonic() + 60
        while (
            any(_living(process.pid)) and time.monotonic() < until
        ):  # freeing memory of GPUs takes a process seconds, and whoever starts then too
            time.sleep(0.05)


def _living(session: int) -> Iterator[bool]:
    """Of each process of a session, whether it has still to end. Ranks have process groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it is gone
            continue
        if int(number) == session:
            yield state not in "ZX"

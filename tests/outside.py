"""The program from outside: a command line in a process of its own, and what it cost."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Seconds of the processor that a refusal may take. Nearly all of them are imports: 0.6 on a quiet machine, thrice that
# on one whose cores are shared.
LONGEST = 3.0
LINE = re.compile(r"error\[[A-Z]+\]: \S.*\n")


@dataclass(frozen=True)
class Ended:
    """How a command ended. `seconds`: of the processor, so that other processes do not count."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def refused(self) -> bool:
        """Whether it ended as bad input does: one line, and nothing else."""
        return self.code == 2 and self.out == "" and LINE.fullmatch(self.err) is not None


def penteract(folder: Path, *words: object, limit: float = 120.0) -> Ended:
    """Run `penteract WORDS` in `folder`, with no launcher around."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    before = _children()
    done = subprocess.run(
        [sys.executable, "-m", "penteract", *map(str, words)], cwd=folder, env=environment, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL, timeout=limit,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr, _children() - before)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

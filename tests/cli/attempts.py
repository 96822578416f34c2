"""One command line in this process, up to the start of its ranks: what it said, what it cost, what it left."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from penteract.cli import main
from penteract.engine.runtime.prepared import PreparedRanks

SECONDS = 1.0  # of the processor, once everything is imported
HANGS = 60  # seconds after which a command waits for what never comes: this process ends and says where
CODES = (0, 2, 65, 74)  # done, bad input, corrupt data, disk
TRIED = re.compile(r"step-\d+ is damaged, trying the one before: ")  # what is said before another is read
LINE = re.compile(r"error\[[A-Z_]+\]: \S")


@dataclass(frozen=True)
class Ended:
    """How a command ended. `seconds`: of the processor. `left`: what was made, changed or kept open."""

    words: Sequence[str]
    code: int
    out: str
    err: str
    seconds: float
    left: frozenset[str]

    def check(self, codes: Sequence[int] = CODES) -> Ended:
        """Assert what holds for any input: it is done, or refused at once in lines that leave nothing behind."""
        assert self.code in codes, self
        assert "Traceback" not in self.out + self.err, self
        assert self.seconds < SECONDS, self
        if self.code:
            assert not self.left, self
            listed = "checkpoints" in self.words and "damaged" in self.out  # in the list that was asked for
            errors = [line for line in self.err.splitlines() if not TRIED.match(line)]
            assert len(errors) <= 3 and all(LINE.match(line) and len(line) < 900 for line in errors), self
            assert errors or listed, self
        return self

    def refused(self, *parts: str) -> Ended:
        """Assert that it was refused in one line that holds `parts`, found and allowed, and a fix where it is not
        the allowed value itself."""
        self.check((2,))
        assert self.err.count("\n") == 1 and "found " in self.err, self
        assert "allowed " in self.err or "fix: " in self.err, self
        assert all(part in self.err for part in parts), self
        return self


@contextlib.contextmanager
def no_ranks() -> Iterator[None]:
    """`train` does all that it does before its ranks, and starts none. Whatever commands import is imported."""
    start = import_module("penteract.engine.runtime.start")
    for name in ("cli.train", "cli.resolve.planned_run", "cli.plan", "cli.init", "cli.convert", "cli.checkpoints",
                 "engine.session.resume", "engine.hf.convert", "engine.hf.writing", "engine.data"):  # fmt: skip
        import_module(f"penteract.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "launch", lambda *_, **__: 0)
        patch.setattr(PreparedRanks, "of", lambda world, environment, gpus: None)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        attempt(["train", "--no-such-option"])  # builds what is cached
        yield


def attempt(words: Sequence[object], folder: Path | None = None) -> Ended:
    """Run `penteract WORDS` in the present folder. `folder`: where nothing may be left; it holds the present one."""
    texts, out, err = [str(word) for word in words], io.StringIO(), io.StringIO()
    before, held = _files(folder), _held()
    faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)
    begun = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(texts)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    finally:
        seconds = time.process_time() - begun
        faulthandler.cancel_dump_traceback_later()
    after = _files(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if not _ends(held):
        changed.add("a thread or an open file")
    return Ended(texts, code, out.getvalue(), err.getvalue(), seconds, frozenset(changed))


def _held() -> int:
    """Threads and open files of this process."""
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def _ends(held: int) -> bool:
    """Whether no more is held than before, at the latest in a second: a thread that was told to end needs a moment."""
    for _ in range(100):
        if _held() <= held:
            return True
        time.sleep(0.01)
    return False


def _files(folder: Path | None) -> Mapping[str, object]:
    """Everything below a folder: its kind, its size and when it was changed."""
    found = dict[str, object]()
    for at, folders, files in os.walk(folder) if folder is not None else ():
        for name in (*folders, *files):
            path = os.path.join(at, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # a beat that has been renamed meanwhile
                continue
            found[path] = (status.st_mode, *(() if name in folders else (status.st_size, status.st_mtime_ns)))
    return found

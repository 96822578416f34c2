"""Whatever is drawn is done or refused at once, in lines, and leaves nothing behind. `make test-all` draws 10,000."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from cli.attempts import SECONDS, Ended, attempt, no_ranks
from cli.drawn import INPUTS, Input


@contextmanager
def bounded_memory(more: int = 6 * 2**30) -> Iterator[None]:
    """An input for which this process would take `more` bytes is one that fails, and does not end the whole suite."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_in(folder: Path, drawn: Input) -> Ended:
    """How the command ends in an empty folder below `folder`; a slow one is tried again, for cores are shared."""
    ended = _once(folder, drawn)
    return ended if ended.seconds < SECONDS else min(ended, _once(folder, drawn), key=lambda each: each.seconds)


def _once(folder: Path, drawn: Input) -> Ended:
    work = Path(tempfile.mkdtemp(dir=folder))
    os.chdir(work)
    try:
        drawn.make()
        return attempt(drawn.words, folder)
    finally:
        os.chdir(folder)
        shutil.rmtree(work)


@pytest.mark.alone
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=INPUTS)
def test_any_input_is_done_or_refused(alone: None, tmp_path_factory: pytest.TempPathFactory, drawn: Input) -> None:
    folder = tmp_path_factory.getbasetemp()
    with no_ranks(), bounded_memory():
        try_in(folder, drawn).check()

"""Shards beside each other (`pytest -n 3 --dist loadfile`): what needs one core, what is alone, what waits.

First comes what needs one core. What is alone has ranks, which take both cores, or is marked `alone`: it measures time
or opens sockets. One shard gets all of it; a lock keeps it from running beside what the others still have. Last
comes what is marked `waits`: it makes faults and waits until ranks have found them. All shards get it, and nothing
else runs beside it. A third shard for two cores: tests wait for files, processes and a browser, and those that wait for
limits need no core.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ALONE, WAITS = "alone", "waits"
_BEGUN = "begun"  # a byte for each test of what is alone that has begun
_SHARED = pytest.StashKey[TemporaryDirectory[str]]()


def waits(item: pytest.Item) -> bool:
    """Whether only what waits, too, may run beside it."""
    return item.get_closest_marker(WAITS) is not None


def is_alone(item: pytest.Item) -> bool:
    """Whether nothing may run beside it."""
    return "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker(ALONE) is not None


def turn(item: pytest.Item) -> int:
    """Whether it comes first, second or third."""
    return 2 if waits(item) else int(is_alone(item))


# ---- in the process that hands tests out -----------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All shards share a folder of this process."""
    stash = node.config.stash
    if _SHARED not in stash:
        stash[_SHARED] = TemporaryDirectory()
        node.config.add_cleanup(stash[_SHARED].cleanup)
    node.workerinput["shared"] = stash[_SHARED].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    config.option.loadscopereorder = False  # what is alone comes last, however many there are
    return Shards(config, log)


class Shards(LoadFileScheduling):
    """Hands out whole files, so that what a file has made once serves all its tests; all that is alone is one."""

    @cached_property
    def turns(self) -> dict[str, str]:
        """What the shards have found to be alone, and what waits: they have met all tests before any is handed out."""
        folder = Path(self.config.stash[_SHARED].name)
        return {nodeid: kind for kind in (ALONE, WAITS) for nodeid in (folder / kind).read_text().splitlines()}

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return {ALONE: ALONE, WAITS: f"{file} {WAITS}"}.get(self.turns.get(nodeid, ""), file)


# ---- in a shard --------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # after what puts tests in a random order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (shared := _shared(config)) is not None:
        items.sort(key=turn)
        for number, kind in ((1, ALONE), (2, WAITS)):
            (shared / kind).write_text("".join(f"{item.nodeid}\n" for item in items if turn(item) == number))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if (shared := _shared(item.config)) is None:
        return (yield)
    if waits(item):
        _wait_for_all_that_is_alone(shared)
    with (shared / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if turn(item) == 1 else fcntl.LOCK_SH)
        if turn(item) == 1:
            with (shared / _BEGUN).open("ab") as begun:
                begun.write(b".")
        return (yield)


def _wait_for_all_that_is_alone(shared: Path) -> None:
    """Until the last of it has begun; the lock does the rest. What has begun and crashed does not count as missing."""
    count = len((shared / ALONE).read_text().splitlines())
    while count and (not (shared / _BEGUN).exists() or (shared / _BEGUN).stat().st_size < count):
        time.sleep(0.05)


def _shared(config: pytest.Config) -> Path | None:
    """The folder that shards share; None in a process that is none."""
    told = getattr(config, "workerinput", None)
    return None if told is None else Path(told["shared"])

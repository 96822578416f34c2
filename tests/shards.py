"""Two shards beside each other (`pytest -n 2 --dist loadfile`): first what needs one core, then the rest in one.

The rest has ranks, which take both cores, or is marked `alone`: it measures time, opens sockets or makes faults. One
shard gets it, last of all. A lock keeps it from running beside what the other shard still has.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ALONE = "alone"
_SHARED = pytest.StashKey[TemporaryDirectory[str]]()


def is_alone(item: pytest.Item) -> bool:
    """Whether nothing may run beside it."""
    return "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker(ALONE) is not None


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
    """Hands out whole files, so that what a file has made once serves all its tests; then what is alone."""

    @cached_property
    def alone(self) -> set[str]:
        """What the shards have found to be alone: they have met all tests before any is handed out."""
        return set(Path(self.config.stash[_SHARED].name, ALONE).read_text().split("\n"))

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if nodeid in self.alone else super()._split_scope(nodeid)


# ---- in a shard --------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # after what puts tests in a random order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (shared := _shared(config)) is not None:
        items.sort(key=is_alone)
        (shared / ALONE).write_text("".join(f"{item.nodeid}\n" for item in items if is_alone(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if (shared := _shared(item.config)) is None:
        return (yield)
    with (shared / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        return (yield)


def _shared(config: pytest.Config) -> Path | None:
    """The folder that shards share; None in a process that is none."""
    told = getattr(config, "workerinput", None)
    return None if told is None else Path(told["shared"])

"""Two shards beside each other (`pytest -n 2`): first the tests that need one core, then one shard alone with the rest.

The rest has ranks, which take both cores, or is marked `alone`: it measures time, opens sockets or makes faults. It is
one group for pytest-xdist, the last in order. A lock keeps it from running beside what the other shard still has.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

ALONE = "alone"


def is_alone(item: pytest.Item) -> bool:
    """Whether nothing may run beside it."""
    return "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker(ALONE) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_alone(item):
        item.add_marker(pytest.mark.xdist_group(ALONE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _in_shard(config):
        items.sort(key=is_alone)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    config.option.loadscopereorder = False  # what is alone comes last, however many there are
    return Files(config, log)


class Files(LoadGroupScheduling):
    """Hands out whole files, so that what a file has made once serves all its tests; then what is alone."""

    def _split_scope(self, nodeid: str) -> str:
        group = super()._split_scope(nodeid)
        return nodeid.split("::")[0] if group == nodeid else group


def pytest_configure_node(node: Any) -> None:
    """All shards know one lock, in a folder of the process that hands tests out."""
    stash = node.config.stash
    if _FOLDER not in stash:
        stash[_FOLDER] = TemporaryDirectory()
        node.config.add_cleanup(stash[_FOLDER].cleanup)
    node.workerinput["lock"] = str(Path(stash[_FOLDER].name) / "lock")


_FOLDER = pytest.StashKey[TemporaryDirectory[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not _in_shard(item.config):
        return (yield)
    with Path(item.config.workerinput["lock"]).open("a") as lock:  # type: ignore[attr-defined]
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        return (yield)


def _in_shard(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")

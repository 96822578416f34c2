"""Shards beside each other (`pytest -n 3 --dist loadfile`): what runs on the pool, all else, what is alone, what waits.

What runs on the pool of ranks comes first, and one shard gets all of it: there is one pool, whose ranks mostly wait for
each other, and it is the longest piece. The others begin with what needs no pool. What is marked `alone` measures time:
one shard gets all of it when the rest is done, and a lock keeps it from running beside what the others still have.
Last comes what is marked `waits`: it makes faults and waits until ranks have found them. All shards get it, and nothing
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

RANKS, ALONE, WAITS = "ranks", "alone", "waits"
KINDS = (RANKS, "", ALONE, WAITS)  # in this order
_FIRST = "first"  # how many tests come before those that wait
_BEGUN = "begun"  # a byte for each of them that has begun
_ENDED = pytest.StashKey[bool]()  # all of them, as this shard has found
_SHARED = pytest.StashKey[TemporaryDirectory[str]]()


def kind(item: pytest.Item) -> str:
    """One of KINDS: which shards get it, when, and beside what."""
    for marked in (WAITS, ALONE):
        if item.get_closest_marker(marked) is not None:
            return marked
    return RANKS if "pool" in getattr(item, "fixturenames", ()) else ""


def seconds(item: pytest.Item) -> float:
    """About how long its file takes, as the mark of what waits says: the longest are handed out first."""
    mark = item.get_closest_marker(WAITS)
    return mark.args[0] if mark is not None and mark.args else 0.0


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
    """Hands out whole files, so that what a file has made once serves all its tests; what runs on the pool is one
    piece, and so is what is alone."""

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What the shards have found: they have met all tests before any is handed out."""
        folder = Path(self.config.stash[_SHARED].name)
        return {nodeid: kind for kind in filter(None, KINDS) for nodeid in (folder / kind).read_text().splitlines()}

    def _split_scope(self, nodeid: str) -> str:
        file, kind = super()._split_scope(nodeid), self.kinds.get(nodeid, "")
        return kind if kind in (RANKS, ALONE) else f"{file} {kind}"


# ---- in a shard --------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # after what puts tests in a random order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (shared := _shared(config)) is not None:
        items.sort(key=lambda item: (KINDS.index(kind(item)), -seconds(item)))
        for one in filter(None, KINDS):
            (shared / one).write_text("".join(f"{item.nodeid}\n" for item in items if kind(item) == one))
        (shared / _FIRST).write_text(str(sum(kind(item) != WAITS for item in items)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if (shared := _shared(item.config)) is None:
        return (yield)
    if (own := kind(item)) == WAITS:
        if not item.config.stash.get(_ENDED, False):
            _wait_for_all_that_come_first(shared)
            item.config.stash[_ENDED] = True
        return (yield)
    with (shared / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if own == ALONE else fcntl.LOCK_SH)
        with (shared / _BEGUN).open("ab") as begun:
            begun.write(b".")
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Ranks that have served the last test of the pool end with it: even those that wait for nothing wake a hundred
    times a second each, as gloo's threads do."""
    pool = getattr(item, "funcargs", {}).get("pool")
    done = yield
    last = nextitem is None or kind(nextitem) != RANKS
    if pool is not None and last and kind(item) == RANKS and _shared(item.config) is not None:
        pool.close()
    return done


def _wait_for_all_that_come_first(shared: Path) -> None:
    """Until the last of them has begun, then until none has the lock: what has begun and crashed is not waited for."""
    count = int((shared / _FIRST).read_text())
    while count and (not (shared / _BEGUN).exists() or (shared / _BEGUN).stat().st_size < count):
        time.sleep(0.05)
    with (shared / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def _shared(config: pytest.Config) -> Path | None:
    """The folder that shards share; None in a process that is none."""
    told = getattr(config, "workerinput", None)
    return None if told is None else Path(told["shared"])

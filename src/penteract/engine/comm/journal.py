"""A rank's journal of its collectives: of each group, the number and kind of the last one entered and left.

The main thread writes it, and another thread reads it, so each note is one assignment. Numbers count the operations of
a group from 1. All members count alike, so equal numbers name the same operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

KEPT = 4  # kinds of the last operations entered, for each group
_SHOWN = 8  # ranks of a group that its name lists


class Kind(NamedTuple):
    """What all members of a group must enter alike. `size`: bytes of the largest tensor; 0 where ranks may differ."""

    name: str
    size: int = 0

    def __str__(self) -> str:
        """As `all_reduce of 64 B`."""
        return f"{self.name} of {self.size} B" if self.size else self.name


@dataclass(slots=True)
class GroupLog:
    """One group's operations on this rank. `entered`, `left`: the numbers of the last ones; 0: none yet. On a GPU, one
    is left when the device has passed the wait for it."""

    name: str  # with its ranks; the same on all members
    entered: int = 0
    left: int = 0
    kinds: deque[Kind] = field(default_factory=lambda: deque[Kind](maxlen=KEPT))  # the last is that of `entered`


class Entry(NamedTuple):
    """An operation that this rank has entered."""

    log: GroupLog
    number: int
    kind: Kind


class DevicePoint(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


@dataclass(slots=True)
class Marks:
    """Points that a device passes in this order. `record`: puts an event into the current stream, an earlier one again
    if it is given one. `begin`: called once by the thread that asks, before it asks. Nothing is kept before."""

    record: Callable[[Any], DevicePoint]
    begin: Callable[[], None] = lambda: None
    pending: deque[tuple[Entry | str, DevicePoint]] = field(default_factory=deque[tuple["Entry | str", DevicePoint]])
    free: deque[DevicePoint] = field(default_factory=deque[DevicePoint])
    passed: int = 0
    action: str = ""  # the last that the device has finished
    begun: bool = False

    def add(self, what: Entry | str) -> None:
        """Everything asked for so far ends with `what`: an operation, or an action by name."""
        if not self.begun:  # nobody asks
            return
        self.pending.append((what, self.record(self.free.popleft() if self.free else None)))

    def poll(self) -> Entry | str | None:
        """See how far the device is. -> what it has not finished yet, the first of it."""
        if not self.begun:
            self.begin()
            self.begun = True
        while self.pending:
            what, event = self.pending[0]
            if not event.query():
                return what
            if isinstance(what, str):
                self.action = what
            else:
                what.log.left = what.number
            self.pending.popleft()
            self.free.append(event)
            self.passed += 1
        return None


@dataclass(slots=True)
class Journal:
    """`count`: operations entered and left so far. `waiting`: what the host waits in. `marks`: None where the host
    itself waits for operations."""

    logs: dict[Any, GroupLog] = field(default_factory=dict[Any, GroupLog])  # by process group, or by a message's ends
    count: int = 0
    waiting: Entry | None = None
    marks: Marks | None = None

    def group(self, key: Any, axis: str, ranks: Sequence[int]) -> GroupLog:
        """The log of a group, a new one the first time."""
        if (log := self.logs.get(key)) is None:
            log = self.logs[key] = GroupLog(name_of(axis, ranks))
        return log

    def message(self, what: str, sender: int, receiver: int) -> GroupLog:
        """The log of the messages from one rank to another."""
        if (log := self.logs.get((what, sender, receiver))) is None:
            log = self.logs[what, sender, receiver] = GroupLog(f"pp {what} {sender} to {receiver}")
        return log

    def enter(self, log: GroupLog, kind: str, size: int = 0) -> Entry:
        """This rank begins an operation: called right before it."""
        entry = Entry(log, log.entered + 1, Kind(kind, size))
        log.kinds.append(entry.kind)
        log.entered = entry.number
        self.count += 1
        return entry

    def finish(self, entry: Entry, wait: Callable[[], object]) -> None:
        """Wait for an operation. One that fails is not left."""
        self.waiting = entry
        wait()
        if self.marks is not None and self.marks.begun:
            self.marks.add(entry)
        else:
            entry.log.left = entry.number
        self.waiting = None
        self.count += 1

    @contextmanager
    def inside(self, log: GroupLog, kind: str, size: int = 0) -> Iterator[None]:
        """An operation that ends on the host. One that fails is not left."""
        self.waiting = entry = self.enter(log, kind, size)
        yield
        entry.log.left, self.waiting = entry.number, None
        self.count += 1

    def state(self) -> tuple[Entry | None, int, str]:
        """(what this rank waits in, a number that changes with each operation and each mark that the device passes, the
        last action that the device has finished)."""
        marks = self.marks
        if marks is None:
            return self.waiting, self.count, ""
        first: Entry | str | None = None
        with suppress(RuntimeError):  # a device that has failed; its error is the main thread's to report
            first = marks.poll()
        waiting = self.waiting or (first if isinstance(first, Entry) else None)
        return waiting, self.count + marks.passed, marks.action


def name_of(axis: str, ranks: Sequence[int]) -> str:
    """The name of a group: `dp {1,3}`."""
    if len(ranks) <= _SHOWN:
        return f"{axis} {{{','.join(map(str, ranks))}}}"
    return f"{axis} {{{','.join(map(str, ranks[:3]))},…,{ranks[-1]}: {len(ranks)} ranks}}"

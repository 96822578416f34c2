"""What a rank tells the others at each beat: where its main thread is, and which collectives it entered and left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penteract.engine.comm.journal import Kind
from penteract.engine.rank.rank_progress import RankProgress, main_thread_at

_TELL_S = 1.0  # from here on a rank without progress says in which line it is


@dataclass(frozen=True, slots=True)
class Collectives:
    """One group's operations on a rank: `entered` and `left` are numbers, `kinds` those of the last ones entered."""

    entered: int
    left: int
    kinds: tuple[Kind, ...] = ()

    def kind(self, number: int) -> Kind | None:
        """The kind of operation `number`; None if it was not entered, or too long ago."""
        i = number - self.entered - 1
        return self.kinds[i] if -len(self.kinds) <= i < 0 else None


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's beat. `tick`: differs between beats. `idle`: seconds without progress, of `limit`, which is that of
    phase `limited_by`. `waits`: (group, number) of the operation that it waits in. `at`: the line of its main thread.
    `finished`: the last action that its device has finished; "" on a CPU."""

    tick: int = -1
    host: str = ""
    phase: str = "join"
    step: int = 0
    action: str = ""
    idle: float = 0.0
    limit: float = 0.0
    limited_by: str = "join"
    waits: tuple[str, int] | None = None
    at: str = ""
    finished: str = ""
    groups: Mapping[str, Collectives] = field(default_factory=dict[str, Collectives])

    @property
    def hangs(self) -> bool:
        """Whether it has made no progress for as long as it may."""
        return self.phase != "done" and self.idle >= self.limit

    def where(self) -> str:
        """Its place in the run: `phase step, step 12, after F3, at session/trainer.py:112 in start`."""
        parts = [f"phase {self.phase}"]
        if self.step:
            parts.append(f"step {self.step}")
        if self.action:
            parts.append(f"after {self.action}")
        if self.finished and self.finished != self.action:
            parts.append(f"its device after {self.finished}")
        if self.at:
            parts.append(f"at {self.at}")
        return ", ".join(parts)


class Own:
    """This rank's records. `idle` counts the seconds that the caller's ticks took, not those of the clock: while all
    processes are suspended together, none is late. `asks_device`: whether what a GPU has passed is progress too; its
    events are recorded from then on."""

    def __init__(self, progress: RankProgress, host: str, *, asks_device: bool = True) -> None:
        self.progress, self.host, self.asks_device = progress, host, asks_device
        self.idle = 0.0
        self._count = -1

    def next(self, tick: int, passed: float) -> Record:
        """The record of a tick, `passed` seconds after the last one."""
        p, journal = self.progress, self.progress.journal
        waiting, count, finished = journal.state() if self.asks_device else (journal.waiting, journal.count, "")
        count += p.ticks
        self.idle = self.idle + passed if count == self._count else 0.0
        self._count = count
        groups = {
            log.name: Collectives(log.entered, log.left, tuple(log.kinds)) for log in list(journal.logs.values())
        }  # fmt: skip
        return Record(
            tick, self.host, p.phase, p.step, p.action, self.idle, p.limit, p.limited_by,
            (waiting.log.name, waiting.number) if waiting is not None else None,
            main_thread_at() if self.idle >= _TELL_S else "", finished, groups,
        )  # fmt: skip


def encode(record: Record) -> str:
    """A record as JSON. Kinds are told only by a rank without progress: beats of a run that goes on stay short."""
    still = record.idle >= _TELL_S
    groups = {name: [g.entered, g.left, *([g.kinds] if still else [])] for name, g in record.groups.items()}
    row = [record.tick, record.host, record.phase, record.step, record.action, round(record.idle, 2), record.limit,
           record.limited_by, record.waits, record.at, record.finished, groups]  # fmt: skip
    return json.dumps(row, separators=(",", ":"))


def decode(text: bytes | str) -> Record:
    """The record of `encode`; an empty one for anything else."""
    try:
        tick, host, phase, step, action, idle, limit, limited_by, waits, at, finished, groups = json.loads(text)
        collectives = {name: _collectives(*row) for name, row in groups.items()}
        where = (waits[0], waits[1]) if waits else None
        return Record(tick, host, phase, step, action, idle, limit, limited_by, where, at, finished, collectives)
    except (ValueError, TypeError, AttributeError, IndexError):
        return Record()


def _collectives(entered: int, left: int, kinds: Any = ()) -> Collectives:
    return Collectives(entered, left, tuple(Kind(*kind) for kind in kinds))

"""A rehearsal: what ranks of a run would allocate, call and send. Schema `penteract.rehearsal/1`.

`penteract rehearse --json` prints one object: the fields of `Rehearsal`, and `schema`. Bytes are bytes; ranks are
numbers in the world.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "penteract.rehearsal/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerBytes:
    """Bytes of one owner. `most`: at any time of a steady step; `at_peak`: when the whole is largest; `priced`: what a
    plan says, None where it has no such owner; `why`: what a difference comes from, "" where there is none."""

    owner: str
    most: int
    at_peak: int
    priced: int | None
    why: str = ""

    @property
    def difference(self) -> int:
        """Bytes that are rehearsed and not priced."""
        return self.most - (self.priced or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """After an action of a steady step: bytes alive, the most since the point before, and those on the host."""

    action: str
    alive: int
    most: int
    host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WireCalls:
    """Equal collectives or messages of a steady step: `calls` of `bytes` each.

    axis   whose groups they are: "tp", …; "parameters" for others; "pp" for messages
    ranks  how many the group has; its members are `first`, and every `step`-th from there on (0: uneven)
    by     the event that starts the first of them
    """

    kind: str
    axis: str
    ranks: int
    first: int
    step: int
    bytes: int
    dtype: str
    calls: int
    by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCalls:
    """Equal calls of a kernel in both steps. `workspace`: bytes that one makes and frees."""

    op: str
    phase: str
    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    calls: int
    workspace: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocations:
    """`count` storages of `bytes` each that an owner was given: at the start, and in the first call of each kind."""

    owner: str
    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """A process group that the rank makes. `channel`: of messages, or ""."""

    axis: str
    ranks: int
    first: int
    step: int
    channel: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """A file that the rank writes; `bytes` with its header."""

    name: str
    bytes: int
    rectangles: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """One rank. `kind`: what it stands for; `at`: its coordinates; `resident`: bytes of its device after the start;
    `peak`: the most in a steady step; `fits`: None where the device's memory is not known."""

    rank: int
    kind: str
    at: dict[str, int]
    resident: int
    peak: int
    fits: bool | None
    owners: tuple[OwnerBytes, ...]
    timeline: tuple[TimelinePoint, ...]
    wires: tuple[WireCalls, ...]
    groups: tuple[ProcessGroup, ...]
    kernels: tuple[KernelCalls, ...]
    allocations: tuple[Allocations, ...]
    checkpoint: tuple[CheckpointFile, ...]

    @property
    def predicted(self) -> int:
        """Bytes of the peak as a plan says: the sum over the owners on the device."""
        return sum(o.priced or 0 for o in self.owners if o.owner != "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalMismatch:
    """A fault of the program, on `rank`. `code`: its kind; `where`: the op, bucket or action."""

    code: str
    what: str
    where: str
    rank: int

    def __str__(self) -> str:
        """The mismatch as one line."""
        return f"mismatch[{self.code}]: rank {self.rank} · {self.what} · {self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The whole rehearsal.

    device          what was rehearsed for: a GPU's name, "cuda" or "cpu"
    usable          bytes that tensors may take there; None where that is not known
    ranks           those that were rehearsed in full
    held_against    other ranks whose collectives and messages were compared: rank -> the axis that they share
    mismatches      faults of the program; none in a sound one
    smaller         changes with which it fits, each with its bytes and its step beside now; where it does not fit
    assumed         what the ranks' hosts must have, and was not looked for
    cpu_seconds     that the rehearsal took
    """

    model: str
    parameters: int
    layout: str
    world: int
    precision: str
    sequence_length: int
    device: str
    usable: int | None
    ranks: tuple[RehearsedRank, ...]
    held_against: dict[str, str]
    mismatches: tuple[RehearsalMismatch, ...]
    smaller: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    cpu_seconds: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether every rehearsed rank fits; None where the device's memory is not known."""
        return None if self.usable is None else all(one.fits for one in self.ranks)

    @property
    def fullest(self) -> RehearsedRank:
        """The rehearsed rank with the largest peak."""
        return max(self.ranks, key=lambda one: one.peak)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}

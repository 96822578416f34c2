"""All findings about a machine, as JSON and as lines.

`penteract doctor --json` prints one object of schema `penteract.doctor/1`:

| key | what |
|---|---|
| `schema` | "penteract.doctor/1"; the number changes when a key is removed or changes its meaning |
| `version` | of penteract |
| `can_train` | whether no finding is bad |
| `findings` | a list of {`area`, `what`, `state`, `fix`}; `state` is ok, note, warn or bad, `fix` may be empty |
| `machine` | the data of the findings: the fields of `machine.HostReport`; null: could not be found out |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from penteract._version import __version__
from penteract.engine.doctor import devices, disk, host, limits, links, software, surroundings, use
from penteract.engine.doctor.finding import Finding
from penteract.engine.doctor.machine import HostReport

SCHEMA = "penteract.doctor/1"

_AREAS: tuple[Callable[[HostReport], Iterator[Finding]], ...] = (
    host.findings, devices.findings, links.findings, software.findings, disk.findings, limits.findings,
    surroundings.findings,
)  # fmt: skip


def examine(machine: HostReport, more: Sequence[Finding] = ()) -> tuple[Finding, ...]:
    """The findings of all areas, with `more`; last, what a run would use, where one can start."""
    found = [finding for area in _AREAS for finding in area(machine)] + list(more)
    starts = can_train(found)
    return (*found, *(finding for finding in use.findings(machine) if starts or finding.state == "bad"))


def can_train(findings: Sequence[Finding]) -> bool:
    """Whether no finding rules training out."""
    return all(f.state != "bad" for f in findings)


def as_json(machine: HostReport, findings: Sequence[Finding]) -> dict[str, Any]:
    """The object described above."""
    rows = [asdict(f) for f in findings]
    return {"schema": SCHEMA, "version": __version__, "can_train": can_train(findings), "findings": rows,
            "machine": asdict(machine)}  # fmt: skip

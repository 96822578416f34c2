"""Measured times on disk, so that a calibration that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penteract.config.files.regular import read_regular
from penteract.errors import BadInput, DiskFailure

Key = tuple[str | int, ...]
SCHEMA = "penteract.calibration/2"
_LARGEST = 2**26


@dataclass(slots=True)
class MeasuredRows:
    """Microseconds by key, in a file of one JSON object a line. The first line says which machine they are of.

    A time of None: it was tried, and the device has no memory for it or its kernel refused.
    """

    path: Path
    about: dict[str, str]
    rows: dict[Key, float | None] = field(default_factory=dict[Key, float | None])
    spreads: dict[Key, float] = field(default_factory=dict[Key, float])  # (slowest - fastest) / median of the rounds

    @staticmethod
    def of(path: Path, about: dict[str, str]) -> MeasuredRows:
        """The rows of a file, or none. Raises BadInput if it is of another machine, other versions or damaged."""
        found = MeasuredRows(path, about)
        try:
            text = read_regular(path, largest=_LARGEST).decode("utf-8") if path.exists() else ""
            *lines, cut_off = text.split("\n")
            if lines and (other := json.loads(lines[0])) != {"schema": SCHEMA, **about}:
                changed = [f"{k} {v}" for k, v in other.items() if about.get(k) != v and k != "schema"]
                raise BadInput("CALIBRATION", "measured on another machine or with other versions", where=str(path),
                               found=", ".join(changed) or "another schema",
                               fix="remove it, or another --out")  # fmt: skip
            for line in lines[1:]:
                row = json.loads(line)
                found.rows[tuple(row["key"])] = row["us"]
                if "spread" in row:
                    found.spreads[tuple(row["key"])] = row["spread"]
            if cut_off:  # the machine went down while it was written
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput("CALIBRATION", f"cannot read what was measured: {error}", where=str(path),
                           fix="remove it") from None  # fmt: skip
        return found

    @staticmethod
    def any_machine(path: Path) -> MeasuredRows:
        """The rows of a file, of whatever machine and versions. Raises BadInput if it cannot be read."""
        try:
            about = json.loads(read_regular(path, largest=_LARGEST).decode("utf-8").partition("\n")[0])
            return MeasuredRows.of(path, {key: value for key, value in about.items() if key != "schema"})
        except (OSError, ValueError, AttributeError) as error:
            raise BadInput("CALIBRATION", f"cannot read what was measured: {error}", where=str(path),
                           fix="remove it") from None  # fmt: skip

    def add(self, key: Key, microseconds: float | None, spread: float | None = None) -> None:
        """Keep a time, in memory and on disk. `spread`: of its rounds, where it is known."""
        fresh = not self.path.exists() or not self.path.stat().st_size
        self.rows[key] = microseconds
        row = {"key": key, "us": microseconds}
        if spread is not None:
            self.spreads[key] = row["spread"] = round(spread, 4)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if fresh:
                    file.write(json.dumps({"schema": SCHEMA, **self.about}) + "\n")
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise DiskFailure("DISK", f"cannot be written: {error.strerror}", where=str(self.path)) from None

    def under(self, *start: str) -> Iterator[tuple[tuple[int, ...], float]]:
        """(the rest of the key, µs) of all keys that begin so and were measured."""
        for key, us in self.rows.items():
            if key[: len(start)] == start and us is not None:
                yield key[len(start) :], us  # type: ignore[misc]

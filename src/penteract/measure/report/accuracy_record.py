"""The record of a report: every row with its errors, which the next report and `make test` compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penteract._version import __version__
from penteract.errors import BadInput
from penteract.measure.report.accuracy_row import AccuracyRow, Amounts
from penteract.measure.results.residual import ErrorSummary

SCHEMA = "penteract.accuracy/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRecord:
    """Rows of ours, and of sets of others the errors of their step times alone."""

    rows: tuple[AccuracyRow, ...]
    published: Mapping[str, ErrorSummary] = field(default_factory=dict[str, ErrorSummary])

    @property
    def groups(self) -> dict[str, list[AccuracyRow]]:
        """The rows by group, in order."""
        found: dict[str, list[AccuracyRow]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def to_json(self) -> str:
        """As a file. Amounts have six digits."""
        return json.dumps({
            "schema": SCHEMA, "command": "penteract report", "version": __version__,
            "published": {about: asdict(summary) for about, summary in self.published.items()},
            "rows": [_row_values(row) for row in self.rows],
        }, indent=1, ensure_ascii=False) + "\n"  # fmt: skip

    @staticmethod
    def read(path: Path) -> AccuracyRecord | None:
        """The record in a file; None where there is none. Raises BadInput where it is no such record."""
        if not path.is_file():
            return None
        try:
            return AccuracyRecord.of_json(path.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput("RECORD", "not a record of accuracy", where=str(path), found=str(error)[:120],
                           fix="remove it, or name another --record") from None  # fmt: skip

    @staticmethod
    def of_json(text: str) -> AccuracyRecord:
        """The record of a text. Raises ValueError, KeyError, TypeError or AttributeError where it is none."""
        values = json.loads(text)
        if values["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        published = {about: ErrorSummary(**found) for about, found in values["published"].items()}
        return AccuracyRecord(rows=tuple(_row_of(one) for one in values["rows"]), published=published)


def _row_values(row: AccuracyRow) -> dict[str, Any]:
    def amounts(found: Amounts) -> dict[str, float]:
        return {name: float(f"{amount:.6g}") for name, amount in asdict(found).items() if amount is not None}

    return {"group": row.group, "name": row.name, "same_program": row.same_program,
            "predicted": amounts(row.predicted), "measured": amounts(row.measured), "errors": row.errors}  # fmt: skip


def _row_of(values: dict[str, Any]) -> AccuracyRow:
    return AccuracyRow(
        group=values["group"], name=values["name"], same_program=values["same_program"],
        predicted=Amounts(**values["predicted"]), measured=Amounts(**values["measured"]),
    )  # fmt: skip

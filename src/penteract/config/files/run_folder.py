"""The files of a run's folder that others read: their names, and what a row of metrics is. The engine writes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

from penteract.units import printable

COMMAND, ERRORS, LATEST, LOGS, RUN, STATUS = (
    "command.txt", "errors.jsonl", "latest", "logs", "run.toml", "status.json"
)  # fmt: skip
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
STEP, PROVEN = r"step-([0-9]{8,})", "proven"  # a committed checkpoint's folder; the file of one that is proven
ERROR_FIELDS = frozenset({"code", "what", "rank", "exit_code"})  # of a row of ERRORS, at least

Number = int | float | str | bool | None
Row = dict[str, Number]


def command_entry(command: str, step: int, at: str) -> str:
    """What COMMAND has of each command: the time and the step at which it began, and itself, as a shell takes it."""
    return f"# {at}, from step {step}\n{command}\n"


def typed(words: Sequence[str], **runs: Path | None) -> str:
    """A command as it was typed, for `command_entry`. A line before it says which run `latest` was, as option `runs`:
    later it is another."""
    meant = [
        f"# --{name} {LATEST} was {printable(str(run.resolve()))}\n"
        for name, run in runs.items()
        if run is not None and (f"--{name}={LATEST}" in words or (f"--{name}", LATEST) in pairwise(words))
    ]
    return "".join(meant) + shlex.join(words)


def commands(text: str) -> list[str]:
    """The commands of COMMAND, the first first; a quoted argument may have several lines."""
    found, begun = list[str](), ""
    for line in text.splitlines():
        if not begun and (line.startswith("#") or not line.strip()):
            continue
        begun += line
        try:
            shlex.split(begun)
        except ValueError:
            begun += "\n"
        else:
            found.append(begun)
            begun = ""
    return found + [begun] * bool(begun)


def metrics_row(line: bytes) -> tuple[int, Row | None]:
    """(step, row) of a line of METRICS; a row without a step is none."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return 0, None
    step = cast("Row", row).get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        return 0, None
    return step, cast("Row", row)


def without_repeated(rows: Sequence[Row]) -> list[Row]:
    """The rows without what a later epoch has trained again."""
    first = dict[int, int]()  # of each epoch: its first step
    for row in rows:
        epoch, step = _whole(row, "epoch"), _whole(row, "step")
        first[epoch] = min(step, first.get(epoch, step))
    return [
        row for row in rows
        if not any(e > _whole(row, "epoch") and step <= _whole(row, "step") for e, step in first.items())
    ]  # fmt: skip


def _whole(row: Row, field: str) -> int:
    found = row.get(field, 0)
    return found if isinstance(found, int) else 0

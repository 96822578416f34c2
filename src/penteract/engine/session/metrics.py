"""`metrics.jsonl`: one JSON object a step, written as the run goes, readable while it does.

| field | unit | when |
|---|---|---|
| `step` | steps done, from 1 | always |
| `epoch` | counts the processes that have had the run, one after the other, from 1 | in a run |
| `tokens` | tokens seen by the model since the run began | always |
| `train/loss` | nats a token, mean over the global batch | always |
| `train/mtp_loss` | nats a token, mean of all depths, times its coefficient | with `mtp_layers` |
| `train/balance_loss` | load-balancing loss of the experts, times its coefficient | with `balance = "loss"` |
| `train/grad_norm` | norm of the whole gradient, before clipping | always |
| `train/lr` | learning rate of this step | always |
| `train/z_loss` | mean squared log-sum-exp of the logits, times its coefficient | when it has one |
| `train/loss_scale` | the factor of the loss in this step | in fp16 |
| `train/skipped` | whether the update was skipped because of an overflow | in fp16 |
| `val/loss` | nats a token | when it was measured |
| `perf/tokens_per_sec` | tokens a second, all ranks | always |
| `perf/step_time_s` | seconds | always |
| `mem/predicted_gib` | GiB that rank 0 was predicted to allocate | when it is known |
| `mem/measured_gib` | GiB allocated by rank 0, at the peak | when it can be measured |

Rows may have other fields. A value that is not finite is written as null: JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from penteract.errors import Bug, CorruptData, DiskFailure

Number = int | float | str | bool | None
Row = dict[str, Number]


class MetricsWriter:
    """Append rows to `path`, one system call each, so that a crash leaves at most the last line incomplete.

    `resume_at` is the last step to keep (0: none); later rows and an incomplete last line are cut off. `epoch` of the
    run, for each row; 0: none.
    """

    def __init__(self, path: Path, *, resume_at: int = 0, epoch: int = 0) -> None:
        self._path, self._epoch = path, epoch
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep, self._step = _length_up_to(path, resume_at)
            # A link may lead anywhere.
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            self._file = os.fdopen(fd, "ab", buffering=0)
            if path.stat().st_size > keep:
                self._file.truncate(keep)
        except OSError as e:
            raise self._failure(e) from e

    def write(self, row: Mapping[str, Number]) -> None:
        """Append a row. Raises DiskFailure when it cannot be written, Bug when `step` does not increase."""
        step = row.get("step")
        if not isinstance(step, int) or step <= self._step:
            raise Bug("METRICS", "steps must increase", where=str(self._path), found=step, allowed=f"> {self._step}")
        left = json.dumps({k: _finite(v) for k, v in self._with_epoch(row).items()}, allow_nan=False).encode() + b"\n"
        try:
            if not os.fstat(self._file.fileno()).st_nlink:
                raise DiskFailure("GONE", "the run's folder is gone: nothing more is written", where=str(self._path),
                                  fix="start a new run, or bring the folder back and resume")  # fmt: skip
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as e:
            raise self._failure(e) from e
        self._step = step

    def _with_epoch(self, row: Mapping[str, Number]) -> Mapping[str, Number]:
        return {"step": row["step"], "epoch": self._epoch, **row} if self._epoch else row

    def close(self) -> None:
        """Close the file; rows written so far stay."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _failure(self, e: OSError) -> DiskFailure:
        return DiskFailure("WRITE", "could not write metrics", where=str(self._path), found=e.strerror,
                           fix="free some space, or choose another run directory")  # fmt: skip


def read_metrics(path: Path) -> list[Row]:
    """All complete rows; a last line that is incomplete or still being written is left out, and so is what a later
    epoch has trained again.

    Raises CorruptData at a bad line before the last, FileNotFoundError when there is no file.
    """
    rows = [row for row, _ in _rows(path)]
    first = dict[int, int]()  # of each epoch: its first step
    for row in rows:
        first[_number(row, "epoch")] = min(_number(row, "step"), first.get(_number(row, "epoch"), _number(row, "step")))
    return [
        row for row in rows
        if not any(e > _number(row, "epoch") and step <= _number(row, "step") for e, step in first.items())
    ]  # fmt: skip


def _number(row: Row, field: str) -> int:
    found = row.get(field, 0)
    return found if isinstance(found, int) else 0


def _length_up_to(path: Path, step: int) -> tuple[int, int]:
    """(bytes, last step) of the rows up to and including `step`."""
    length, last = 0, 0
    if step > 0 and path.exists():
        for row, end in _rows(path):
            at = row.get("step")
            if not isinstance(at, int) or at > step:
                break
            length, last = end, at
    return length, last


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Each row and the offset of its end."""
    lines, end = path.read_bytes().splitlines(keepends=True), 0
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        end += len(line)
        if row is not None:
            yield row, end
        elif number < len(lines):
            raise CorruptData("METRICS", "not a row of metrics", where=f"{path}:{number}", found=repr(line[:40]),
                              allowed='{"step": 1, …}', fix="delete this line")  # fmt: skip


def _parse(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row: object = json.loads(line)
    except ValueError:
        return None
    return cast("Row", row) if isinstance(row, dict) else None


def _finite(value: Number) -> Number:
    return None if isinstance(value, float) and not math.isfinite(value) else value

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
| `train/exact_rows` | whether experts had exact rows, as copies did not fit their blocks | padded, by all-to-all |
| `train/loss_scale` | the factor of the loss in this step | in fp16 |
| `train/skipped` | whether the update was skipped because of an overflow | in fp16 |
| `val/loss` | nats a token | when it was measured |
| `perf/tokens_per_sec` | tokens a second, all ranks | always |
| `perf/step_time_s` | seconds | always |
| `perf/predicted_step_time_s` | seconds that a step was predicted to take; null without a GPU of the catalog | always |
| `perf/mfu` | model FLOPs over the dense peak in the compute dtype; null where that is not known | always |
| `perf/model_tflops_per_rank` | model TFLOP/s of a rank, by the FLOPs of `perf/mfu` | in a run |
| `energy/gpu_j` | joules that rank 0's GPU used since the row before | with NVML |
| `mem/predicted_gib` | GiB that rank 0 was predicted to allocate | when it is known |
| `mem/measured_gib` | GiB allocated by rank 0, at the peak | when it can be measured |

MFU counts three forward passes of the matmul parameters, without the embedding lookup, and of full attention, without
what is recomputed: the convention of `penteract plan --json`, `mfu`.

Rows may have other fields. A value that is not finite is written as null: JSON has no NaN.

A line that is no row, because a disk or an editor spoiled it, costs that row alone. Readers skip it and say so once;
a run that resumes moves it to `metrics.bad.jsonl`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from penteract.config.files.run_folder import Number, Row, metrics_row, without_repeated
from penteract.config.run import RunPrediction
from penteract.errors import Bug, DiskFailure

log = logging.getLogger("penteract")


def speed(tokens: int, seconds: float, ranks: int, predicted: RunPrediction) -> Row:
    """How fast a step of `tokens` tokens was on all ranks, and what was predicted of it."""
    row: Row = {
        "perf/tokens_per_sec": tokens / seconds, "perf/step_time_s": seconds,
        "perf/predicted_step_time_s": predicted.step_s, "perf/mfu": predicted.mfu(seconds),
    }  # fmt: skip
    if predicted.model_flops:
        row["perf/model_tflops_per_rank"] = predicted.model_flops / seconds / ranks / 1e12
    return row


class MetricsWriter:
    """Append rows to `path`, one system call each, so that a crash leaves at most the last line incomplete.

    `resume_at` is the last step to keep (0: none); later rows and an incomplete last line are cut off, and bad lines
    before them are set aside. `epoch` of the run, for each row; 0: none.
    """

    def __init__(self, path: Path, *, resume_at: int = 0, epoch: int = 0) -> None:
        self._path, self._epoch = path, epoch
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = _Lines.of(path.read_bytes() if resume_at and path.exists() else b"", resume_at)
            self._step = kept.step
            if kept.bad:
                _set_aside(path, kept)
            # A link may lead anywhere.
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            self._file = os.fdopen(fd, "ab", buffering=0)
            if path.stat().st_size > kept.size:
                self._file.truncate(kept.size)
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
    """All complete rows; a last line that is incomplete or still being written is left out, and a bad line before it
    too, with a warning. So is what a later epoch has trained again. Raises FileNotFoundError when there is no file."""
    found = _Lines.of(path.read_bytes())
    if found.bad:
        log.warning("%s: %s; left out", path, found.about)
    return without_repeated(found.rows)


@dataclass(slots=True)
class _Lines:
    """The lines of a file up to some step: its rows, the bytes that they take, and what is no row, by line number."""

    rows: list[Row] = field(default_factory=list[Row])
    good: list[bytes] = field(default_factory=list[bytes])
    bad: dict[int, bytes] = field(default_factory=dict[int, bytes])
    step: int = 0  # the last

    @staticmethod
    def of(content: bytes, until: float = math.inf) -> _Lines:
        """`until`: the last step that is read. Bad lines after the last row that is kept do not count."""
        found, pending = _Lines(), dict[int, bytes]()
        for number, line in enumerate(content.split(b"\n")[:-1], 1):  # what follows the last newline is incomplete
            step, row = metrics_row(line)
            if row is None:
                if line.strip():
                    pending[number] = line
                continue
            if step > until:
                break
            found.rows.append(row)
            found.good.append(line + b"\n")
            found.bad |= pending
            found.step, pending = step, {}
        return found

    @property
    def size(self) -> int:
        return sum(map(len, self.good))

    @property
    def about(self) -> str:
        """What is bad, in a phrase."""
        first, line = next(iter(self.bad.items()))
        many = "1 line is no row of metrics" if len(self.bad) == 1 else f"{len(self.bad)} lines are no rows of metrics"
        return f"{many} (line {first}: {line[:40]!r})"


def _set_aside(path: Path, found: _Lines) -> None:
    """Move bad lines to a file of their own. A crash in between leaves them in both files."""
    aside = path.with_name(f"{path.stem}.bad.jsonl")
    with aside.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in found.bad.values()))
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_bytes(b"".join(found.good))
    fresh.replace(path)
    log.warning("%s: %s; set aside in %s", path, found.about, aside.name)


def _finite(value: Number) -> Number:
    return None if isinstance(value, float) and not math.isfinite(value) else value

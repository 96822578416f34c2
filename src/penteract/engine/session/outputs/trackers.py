"""What shows the metrics besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

A tracker is a service of others: it may be slow, full, or gone. So each has a thread and a bounded queue; whatever
happens in it is said once, and never ends or delays a run. `metrics.jsonl` has every row in any case.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from penteract.config.files.run_folder import Number
from penteract.config.run import RunSpec, TrackerName

log = logging.getLogger("penteract")

_WAITING = 1000  # rows that a tracker may be behind

Scalars = dict[str, float]


class Tracker(Protocol):
    """Shows numbers by step. Any exception of a method means that it is broken: it is not called again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step; steps increase."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files in the run's folder, which `tensorboard --logdir` shows. What an earlier process wrote of steps from
    `first` on is not shown any more."""

    def __init__(self, folder: Path, first: int) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(folder / "tensorboard"), purge_step=first if first > 1 else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, or of trackio, which has the same functions. Its project is the model's name (or
    WANDB_PROJECT), its name the run folder's, so that a resumed run goes on in it."""

    def __init__(self, module: str, spec: RunSpec, folder: Path, project: str | None = None) -> None:
        self._api: Any = import_module(module)
        how: dict[str, Any] = {"project": project or spec.model.name, "name": folder.name, "resume": "allow"}
        if module == "wandb":  # trackio keeps its data in one place for all runs, and finds a run by its name
            how |= {"id": folder.name, "dir": str(folder)}
        self._api.init(config=asdict(spec), **how)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step."""
        self._api.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._api.finish()


def open_tracker(name: TrackerName, spec: RunSpec, folder: Path, first: int, project: str | None = None) -> Tracker:
    """The tracker of a run that begins at step `first`. Raises what its package raises."""
    if name == "tensorboard":
        return TensorBoard(folder, first)
    return WandbTracker(name, spec, folder, project)


@dataclass(slots=True)
class BackgroundTracker:
    """A tracker with a thread of its own, which also opens it."""

    name: str
    make: Callable[[], Tracker]
    waiting: Queue[tuple[int, Scalars] | None] = field(default_factory=lambda: Queue(_WAITING))
    broken: bool = False
    saying: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self.thread.start()

    def log(self, step: int, values: Scalars) -> None:
        """Hand over a row; returns at once."""
        if self.broken:
            return
        try:
            self.waiting.put_nowait((step, values))
        except Full:
            self._break(f"it is {_WAITING} steps behind")

    def close(self, seconds: float) -> None:
        """Give it `seconds` for what is left."""
        if self.broken:
            return
        until = time.monotonic() + seconds
        try:
            self.waiting.put(None, timeout=seconds)
        except Full:
            self._break(f"it is {_WAITING} steps behind")
        self.thread.join(max(0.0, until - time.monotonic()))
        if self.thread.is_alive():
            self._break(f"it had not ended after {seconds:.0f} s")

    def _work(self) -> None:
        try:
            tracker = self.make()
            while not self.broken and (row := self.waiting.get()) is not None:
                tracker.log(*row)
            tracker.close()
        except BaseException as e:  # some packages leave by SystemExit
            self._break(f"{type(e).__name__}: {e}")

    def _break(self, why: str) -> None:
        with self.saying:
            if not self.broken:
                line = "%s shows no more metrics, metrics.jsonl goes on: %s"
                log.warning(line, self.name, " ".join(why.split())[:300])
            self.broken = True


@dataclass(frozen=True, slots=True)
class Trackers:
    """All trackers of a run; on rank 0."""

    each: tuple[BackgroundTracker, ...] = ()

    def log(self, row: Mapping[str, Number]) -> None:
        """Show the numbers of a row of metrics by its `step`; what is no finite number is left out."""
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        step = int(numbers.pop("step"))
        for tracker in self.each:
            tracker.log(step, numbers)

    def close(self, seconds: float = 20.0) -> None:
        """End them all; `seconds` is what they have together for what is left."""
        until = time.monotonic() + seconds
        for tracker in self.each:
            tracker.close(max(0.0, until - time.monotonic()))


def open_trackers(spec: RunSpec, folder: Path, first: int, project: str | None = None) -> Trackers:
    """The trackers that the run file names. It raises nothing."""

    def background(name: TrackerName) -> BackgroundTracker:
        return BackgroundTracker(name, lambda: open_tracker(name, spec, folder, first, project))

    return Trackers(tuple(background(name) for name in spec.trackers))

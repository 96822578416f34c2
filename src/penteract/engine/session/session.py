"""A training session on one rank: open, train, validate, save, end."""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from penteract.config.run import RunSpec
from penteract.engine import checkpoint
from penteract.engine.data import Samples, check_vocabulary, open_samples, open_tokenizer
from penteract.engine.runtime.rank import Rank
from penteract.engine.runtime.watch import from_exception
from penteract.engine.session import rundir
from penteract.engine.session.compare import Comparison, load_gradients, save_gradients
from penteract.engine.session.display import LiveTable
from penteract.engine.session.metrics import MetricsWriter
from penteract.engine.session.resume import other_precision, resume_settings
from penteract.engine.session.sample import write
from penteract.engine.session.saved import after_load, load_state, state_slices
from penteract.engine.session.trainer import Outcome, Trainer
from penteract.errors import BadNumerics, Preempted
from penteract.units import gib, show_count

log = logging.getLogger("penteract")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of the command line that are not in the run file."""

    folder: Path  # of the run
    compare: Path | None = None
    resume: Path | None = None
    init: Path | None = None  # the weights to start from
    as_json: bool = False
    predicted: int = 0  # bytes that rank 0 will allocate


class Begun(NamedTuple):
    """A step that the device was asked for: when, the samples seen with it, and what waits for its outcome."""

    number: int
    at: float  # by `time.perf_counter`
    samples: int
    outcome: Callable[[], Outcome]


@dataclass(slots=True)
class Session:
    """One rank's training loop. Rank 0 alone prints and writes metrics; all ranks do the rest together."""

    spec: RunSpec
    rank: Rank
    options: SessionOptions
    trainer: Trainer = field(init=False)
    train: Samples = field(init=False)
    validation: Samples = field(init=False)
    tokenizer: Any = field(init=False)
    first: int = 1
    samples: int = 0  # trained on before the next step
    losses: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])
    measured: int = 0  # bytes at the peak of one step; 0: not measured yet
    ended: float = 0.0  # when the last outcome was read
    asked_to_stop: bool = False

    # ---- opening ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open tokenizer, data and trainer, and load the checkpoint of a resumed run. Raises BadInput where they do not
        fit each other."""
        spec = self.spec
        self.tokenizer = open_tokenizer(spec.tokenizer)
        check_vocabulary(self.tokenizer, spec.model.vocab_size)
        self._open_data()
        self.trainer = Trainer.build(spec, self.rank, self.options.init)
        if spec.train.validation_every and len(self.validation):
            self.trainer.check_validation(self.validation)
        if self.options.resume is not None:
            self._load(self.options.resume)

    def _open_data(self) -> None:
        """Open the data on rank 0 first: it may have to tokenise a large text into the cache that the others read."""
        spec, cache = self.spec, Path(self.spec.out) / "cache"

        def open_them() -> None:
            self.train, self.validation = open_samples(
                spec.data, self.tokenizer, spec.sequence_length, spec.train.seed, cache
            )

        self.rank.first(open_them)

    def _load(self, folder: Path) -> None:
        """Resume from the newest checkpoint, after its last sample; on any layout, with any batch size."""
        at = checkpoint.latest(folder / "checkpoints")
        extra = load_state(at, self.trainer.program, self.trainer.state)
        after_load(self.trainer.run)
        step = int(extra["step"])
        self.first, self.samples = step + 1, int(extra["samples"])
        self.rank.barrier()
        if self.rank.number == 0:
            rundir.mark_resumed(folder, world=self.rank.world)
        if self.rank.number == 0 and (line := other_precision(extra, self.spec)):
            log.warning("%s", line)
        log.info("resumed from step %d of %s", step, folder)

    # ---- the loop --------------------------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Train to the end; returns the closing line of `--json`."""
        compare = Comparison(self.options.compare) if self.options.compare else None
        under_way: Begun | None = None
        with self._showing() as shown, self._stopping():
            for number in range(self.first, self.spec.train.steps + 1):
                begun = self._begin(number)
                if under_way is not None:
                    self._end(under_way, shown)
                under_way = begun
                if self._at_once(number):
                    self._end(begun, shown, compare)
                    under_way = None
            return self._finish(shown[0] if self.rank.number == 0 else None, compare)

    def _at_once(self, number: int) -> bool:
        """Whether a step's outcome is read before the next begins. A GPU need not wait for that, but where the state
        after this very step is looked at, or where its memory is."""
        train = self.spec.train
        looked_at = _every(self.spec.checkpoint.every, number) or _every(train.validation_every, number)
        return not self.trainer.run.device.behind or number <= self.first + 1 or looked_at or number == train.steps

    def _begin(self, number: int) -> Begun:
        """Ask the device for a step."""
        self.trainer.run.stop.fill_(float(self.asked_to_stop))
        at, first = time.perf_counter(), self.samples
        self.samples += self.spec.layout.global_batch_size
        if number == min(self.first + 1, self.spec.train.steps):  # the second: everything is in place, nothing is new
            outcome, self.measured = self.trainer.measured_step(number, self.train, first)
            return Begun(number, at, self.samples, lambda: outcome)
        return Begun(number, at, self.samples, self.trainer.start(number, self.train, first))

    def _end(self, begun: Begun, shown: tuple[Any, Any], compare: Comparison | None = None) -> None:
        """Read a step's outcome, show it, and save where it is time to."""
        number, outcome = begun.number, self._outcome(begun)
        told = number == 1 and not outcome.skipped  # a gradient that overflowed is none
        if told and save_gradients(self.trainer, self.options.folder, self.rank) and compare:
            compare.gradient = load_gradients(self.trainer, compare.folder, self.rank)
        last = outcome.stop or number == self.spec.train.steps
        row = self._row(begun, outcome, last)
        if self.rank.number == 0:
            table, metrics = shown
            metrics.write(row)
            table.step(row)
        if last or _every(self.spec.checkpoint.every, number):
            self._save(number, begun.samples)
        if outcome.stop and number < self.spec.train.steps:
            self._check_prefetch(number)
            raise Preempted("STOPPED", f"stopped after step {number}, which is saved",
                            where=str(self.options.folder),
                            fix=f"penteract train --resume {self.options.folder}")  # fmt: skip

    def _outcome(self, begun: Begun) -> Outcome:
        """Wait for a step's outcome; BadNumerics where it is not finite."""
        outcome, size = begun.outcome(), self.spec.layout.global_batch_size
        now = time.perf_counter()
        self.times.append(now - max(begun.at, self.ended))
        self.ended = now
        self.losses.append(outcome.loss)
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.norm)) and not outcome.skipped:
            # The device skipped the update on every rank, so this saves the state before this step.
            if begun.number > self.first:
                self._save(begun.number - 1, begun.samples - size)
            raise BadNumerics("NUMERICS", "the loss or its gradient is not finite; the step before it is saved",
                              where=f"step {begun.number}", found=f"loss {outcome.loss}, gradient norm {outcome.norm}",
                              fix="a smaller --optimizer.learning_rate, or more warm-up")  # fmt: skip
        return outcome

    def _check_prefetch(self, number: int) -> None:
        """If a rank could not load the batch after step `number`, raise its error on all ranks."""
        failed = self.trainer.loader.failed
        if (error := self.rank.one_of(failed and from_exception(failed))) is not None:
            error.what += f"; step {number} is saved"
            raise error from failed

    def _row(self, begun: Begun, outcome: Outcome, last: bool) -> dict[str, Any]:
        """The step's row of metrics.jsonl; runs the validation if it is due."""
        spec, number = self.spec, begun.number
        row: dict[str, Any] = {
            "step": number, "tokens": begun.samples * spec.sequence_length, "train/loss": outcome.loss,
            "train/grad_norm": outcome.norm, "train/lr": self.trainer.rate(number),
            "perf/tokens_per_sec": spec.tokens_per_step / self.times[-1], "perf/step_time_s": self.times[-1],
            "mem/predicted_gib": gib(self.options.predicted),
        }  # fmt: skip
        if self.measured:
            row["mem/measured_gib"] = gib(self.measured)
        row |= {f"train/{term.removesuffix('_loss')}_loss": amount for term, amount in outcome.auxiliary_losses.items()}
        if outcome.loss_scale:
            row |= {"train/loss_scale": outcome.loss_scale, "train/skipped": outcome.skipped}
        every = spec.train.validation_every
        if len(self.validation) and (_every(every, number) or (every and last)):
            row["val/loss"] = self.trainer.validate(self.validation)
        return row

    def _save(self, number: int, samples: int) -> None:
        self.trainer.run.settle_parameters()
        extra = {"step": number, "samples": samples, "layout": asdict(self.spec.layout), **resume_settings(self.spec)}
        checkpoint.save(
            self.options.folder / "checkpoints", number, state_slices(self.trainer.program, self.trainer.state), extra,
            rank=self.rank.number, world=self.rank.world, barrier=self.rank.barrier, keep=self.spec.checkpoint.keep,
        )  # fmt: skip

    # ---- the end ---------------------------------------------------------------------------------------------

    def _finish(self, table: LiveTable | None, compare: Comparison | None) -> dict[str, Any]:
        self.trainer.run.settle_parameters()  # no collective may be under way when a process ends
        text = self._text()
        result = self._result()
        if table is None:
            return result
        if compare is not None:
            result |= compare.result(self.first, self.losses)
        table.close()
        out = sys.stderr if self.options.as_json else sys.stdout
        if text:
            print(f"\nThe model writes: {text}\n", file=out)
        if compare is not None:
            print(compare.line(result), file=out)
        if self.losses:
            table.finish(self.losses[0], self.losses[-1], sum(self.times))
        return result

    def _text(self) -> str:
        if not self.spec.train.sample_tokens or not self.losses:
            return ""
        prompt = [int(i) for i in self.tokenizer.encode("def ")] or [self.tokenizer.end_of_document]
        ids = write(self.trainer, prompt, self.spec.train.sample_tokens, seed=self.spec.train.seed)
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])

    def _result(self) -> dict[str, Any]:
        tokens = self.spec.tokens_per_step / median(self.times[2:] or self.times) if self.times else 0.0
        memory = {
            "predicted_gib": gib(self.options.predicted),
            "measured_gib": gib(self.measured) if self.measured else None,
        }
        first, last = (self.losses[0], self.losses[-1]) if self.losses else (None, None)
        return {
            "run_dir": str(self.options.folder),
            "steps": self.first - 1 + len(self.losses),
            "loss_first": first,
            "loss_last": last,
            "layout": asdict(self.spec.layout),
            "tokens_per_s": tokens,
            "memory": memory,
        }

    # ---- output and signals ----------------------------------------------------------------------------------

    @contextmanager
    def _showing(self) -> Iterator[tuple[Any, Any]]:
        """The live table and metrics.jsonl, on rank 0."""
        if self.rank.number:
            yield None, None
            return
        lay, steps = self.spec.layout, self.spec.train.steps
        degrees = " ".join(f"{a}={getattr(lay, a)}" for a in ("dp", "tp", "pp", "cp", "ep"))
        n = sum(math.prod(q.shape) for q in self.trainer.program.everything)
        title = f"{self.spec.model.name}, {show_count(n)} parameters · {degrees} · {self.rank.device}"
        with (
            LiveTable(steps, title, json=self.options.as_json) as table,
            MetricsWriter(self.options.folder / "metrics.jsonl", resume_at=self.first - 1) as metrics,
        ):
            yield table, metrics

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM makes all ranks save and stop after the step; the second ends this one at
        once."""

        def ask(number: int, frame: object) -> None:
            self.asked_to_stop = True
            signal.signal(number, signal.SIG_DFL)

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


def _every(n: int, number: int) -> bool:
    """Whether step `number` is one of every n; never when n is 0."""
    return n > 0 and number % n == 0


def closing_line(result: dict[str, Any]) -> str:
    """The last line of `--json`."""
    return json.dumps(result)


def set_up(spec: RunSpec) -> None:
    """Set up logging, and turn autograd off; on every rank before it starts."""
    logging.basicConfig(level=spec.train.log_level.upper(), format="%(message)s", stream=sys.stderr)
    torch.set_grad_enabled(False)

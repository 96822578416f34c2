"""A training session on one rank: open, train, validate, save, end."""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from penteract.config.run import RunPrediction, RunSpec
from penteract.engine.data import Samples, SharedFolder, check_vocabulary, open_samples, open_tokenizer
from penteract.engine.device.cpu_affinity import threads_of
from penteract.engine.device.device import device_of
from penteract.engine.device.own_folder import own_folder
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.failures import from_exception
from penteract.engine.rank.rank import Rank
from penteract.engine.rank.stopping import Stopping
from penteract.engine.run_folder import rundir
from penteract.engine.session.ahead.awaited import await_kernels
from penteract.engine.session.background.opening import open_background
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.compare import Comparison, load_gradients, save_gradients
from penteract.engine.session.garbage import collect_after, collected_between_steps
from penteract.engine.session.grace import Grace
from penteract.engine.session.outputs.display import LiveTable
from penteract.engine.session.outputs.metrics import speed
from penteract.engine.session.outputs.step_outputs import StepOutputs, step_outputs
from penteract.engine.session.resume import other_precision, other_rate, other_update, resume_settings, stays_on_cpus
from penteract.engine.session.sample import write
from penteract.engine.session.saved import RecipeState, after_load, load_state, saved_bytes
from penteract.engine.session.state_saver import StateSaver
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadNumerics, Preempted
from penteract.units import gib, show_count, show_path

log = logging.getLogger("penteract")

_PROMPT = "def "  # of the text that the model writes at the end


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of the command line that are not in the run file."""

    folder: Path  # of the run
    compare: Path | None = None
    resume: Path | None = None
    init: Path | None = None  # the weights to start from
    as_json: bool = False
    predicted: RunPrediction = field(default_factory=RunPrediction)
    epoch: int = 0  # of the run: one more each time that a process group goes on with it
    grace: float = 30.0  # seconds from a request to stop to the kill
    command: str = ""  # that resumes the run


class Begun(NamedTuple):
    """A step that the device was asked for: when, and what waits for its outcome."""

    number: int
    at: float  # by `time.perf_counter`
    outcome: Callable[[], Outcome]


@dataclass(slots=True)
class Session:
    """One rank's training loop. Rank 0 alone prints and writes metrics; all ranks do the rest together."""

    spec: RunSpec
    rank: Rank
    options: SessionOptions
    stopping: Stopping = field(default_factory=Stopping)
    trainer: Trainer = field(init=False)
    checkpoints: Checkpoints = field(init=False)
    saver: StateSaver = field(init=False)
    train: Samples = field(init=False)
    validation: Samples = field(init=False)
    tokenizer: Any = field(init=False)
    first: int = 1
    samples_before: int = 0  # trained on before step `first`
    losses: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])
    measured: int = 0  # bytes at the peak of one step; 0: not measured yet
    ended: float = 0.0  # when the last outcome was read
    grace: Grace = field(init=False)

    # ---- opening ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open tokenizer, data and trainer, and load the checkpoint of a resumed run. Raises BadInput where they do not
        fit each other."""
        spec, progress = self.spec, self.rank.progress
        progress.enter("data")
        self.tokenizer = open_tokenizer(spec.tokenizer)
        check_vocabulary(self.tokenizer, spec.model.vocab_size)
        here = self.rank.count_here()
        self._open_data(here)
        progress.enter("compile")
        threads = device_of(self.rank.device).saving_threads(here)
        folder, keep = self.options.folder / "checkpoints", self.spec.checkpoint.keep
        self.checkpoints = Checkpoints(folder, self.rank, keep, self.options.epoch, threads=threads)
        self.checkpoints.begin()
        self.trainer = Trainer.build(spec, self.rank, self.options.init)
        self.grace = Grace(self.options.grace, saved_bytes(self.trainer.program) / self.rank.world)
        if spec.train.validation_every and len(self.validation):
            with progress.during("data"):
                self.trainer.check_validation(self.validation)
        if self.options.resume is not None:
            with progress.during("load"):
                self._load(self.options.resume)
        saves = spec.saves_after(self.first - 1)
        self.checkpoints.check_room(saved_bytes(self.trainer.program), saves)
        background = open_background(spec, self.rank, self.trainer, self.checkpoints, saves=saves)
        self.grace.saves = 1 if background is None else 2
        self.saver = StateSaver(
            self.trainer, self.checkpoints, self.stopping, self.grace, self._extra, spec.checkpoint.every, background
        )

    def _open_data(self, here: int) -> None:
        """Open the data on rank 0 first: it may have to tokenise a large text into the cache that the others read.
        `here`: how many ranks of this host share what is tokenised of a stream."""
        spec, cache = self.spec, Path(self.spec.out) / "cache"
        start, shared = self.rank.broadcast(secrets.token_hex(8)), None
        if here > 1 and (mine := own_folder()) is not None:
            shared = SharedFolder(mine / "streams" / start, here)

        def open_them() -> None:
            self.train, self.validation = open_samples(
                spec.data, self.tokenizer, spec.sequence_length, spec.train.seed, cache, shared
            )

        self.rank.first(open_them, spec.limits.data)

    def _load(self, folder: Path) -> None:
        """Resume from the newest checkpoint, after its last sample; on any layout, with any batch size."""
        trainer = self.trainer
        recipe_state = RecipeState(trainer.state)

        def load(at: Path) -> dict[str, Any]:
            recipe_state.restore(trainer.state)  # of a checkpoint that could not be read, nothing stays
            return load_state(at, trainer.program, trainer.state, threads_of(self.rank.count_here()))

        extra = self.checkpoints.load(load)
        after_load(trainer.run)
        step = int(extra["step"])
        trainer.run.done.fill_(step)
        self.first, self.samples_before = step + 1, int(extra["samples"])
        self._expect_data(extra.get("data"))
        self.train.go_on(dict(extra.get("stream", {})))
        self.rank.barrier()
        if self.rank.number == 0:
            rundir.mark_resumed(folder, self.rank.world, self.options.command, self.first)
        log.info("resumed from step %d of %s", step, show_path(folder))
        if self.rank.number == 0:
            changes = [other_precision(extra, self.spec), other_rate(extra, self.spec, self.first)]
            changes.append(other_update(extra, self.spec))
            for line in filter(None, (*changes, stays_on_cpus(self.spec, self.options.command))):
                log.warning("%s", line)

    def _expect_data(self, then: dict[str, Any] | None) -> None:
        """Refuse other data than that of the checkpoint, unless the run file allows it."""
        if then is None:
            log.warning("the checkpoint does not say what data the run was trained on: not compared")
        elif not self.spec.data.allow_change:
            self.train.expect(then)

    # ---- the loop --------------------------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Train to the end; returns the closing line of `--json`."""
        compare = Comparison(self.options.compare) if self.options.compare else None
        await_kernels(self.spec, self.rank)
        under_way: Begun | None = None
        options = self.options
        if self.rank.number == 0 and options.resume is None:
            rundir.make_latest(options.folder, self.spec.out)
        outputs = step_outputs(self.spec, self.rank, options.folder, self._title(), first=self.first,
                               epoch=options.epoch, as_json=options.as_json)  # fmt: skip
        with outputs as shown, collected_between_steps(), self.saver.ending_writer(), closing(self.train):
            for number in range(self.first, self.spec.train.steps + 1):
                begun = self._begin(number)
                collect_after(number - self.first + 1)  # while the device computes
                if under_way is not None:
                    self._end(under_way, shown)
                under_way = begun
                if self._at_once(number):
                    self._end(begun, shown, compare)
                    under_way = None
            self.saver.close()
            return self._finish(shown and shown.table, compare)

    def _at_once(self, number: int) -> bool:
        """Whether a step's outcome is read before the next begins. A GPU need not wait for that, but where the state
        after this very step is looked at, or where its memory is."""
        train = self.spec.train
        looked_at = _every(self.spec.checkpoint.every, number) or _every(train.validation_every, number)
        looked_at = looked_at or _every(train.replica_check_every, number) or self.saver.due
        return not self.trainer.run.device.behind or number <= self.first + 1 or looked_at or number == train.steps

    def _begin(self, number: int) -> Begun:
        """Ask the device for a step."""
        self.rank.progress.begin_step(number, first=number == self.first)
        self.trainer.run.stop.fill_(float(self.stopping.asked))
        at, first = time.perf_counter(), self._samples_after(number - 1)
        if number == min(self.first + 1, self.spec.train.steps):  # the second: everything is in place, nothing is new
            outcome, self.measured = self.trainer.measured_step(number, self.train, first)
            return Begun(number, at, lambda: outcome)
        return Begun(number, at, self.trainer.start(number, self.train, first))

    def _end(self, begun: Begun, shown: StepOutputs | None, compare: Comparison | None = None) -> None:
        """Read a step's outcome, show it, and save where it is time to."""
        number, outcome = begun.number, self._outcome(begun)
        has_first_gradients = number == 1 and not outcome.skipped  # a gradient that overflowed is none
        if has_first_gradients:
            with self.rank.progress.during("save"):
                if save_gradients(self.trainer, self.options.folder, self.rank) and compare:
                    compare.gradient = load_gradients(self.trainer, compare.folder, self.rank)
        last = outcome.stop or number == self.spec.train.steps
        if _every(self.spec.train.replica_check_every, number):
            self.saver.check(number)
        row = self._row(begun, outcome, last)
        if shown is not None:
            shown.write(row)
        if last:
            self.saver.save()
        else:
            self.saver.save_due(number)
        self._print_grace()
        if outcome.stop and number < self.spec.train.steps:
            self.saver.close()
            self._check_prefetch(number)
            raise Preempted("STOPPED", f"stopped after step {number}, which is saved",
                            where=str(self.options.folder),
                            fix=f"penteract train --resume {self.options.folder}")  # fmt: skip

    def _outcome(self, begun: Begun) -> Outcome:
        """Wait for a step's outcome; BadNumerics where it is not finite."""
        outcome = begun.outcome()
        now = time.perf_counter()
        self.times.append(now - max(begun.at, self.ended))
        self.ended = now
        self.losses.append(outcome.loss)
        if not outcome.finite and not outcome.skipped:
            self.trainer.check_unreplicated(begun.number)
            # The device skipped the update on every rank, so this saves the state before this step.
            self.saver.save(prune=False)
            saved = f"step {self.checkpoints.last} is saved" if self.checkpoints.last else "nothing is saved yet"
            raise BadNumerics("NUMERICS", f"the loss or its gradient is not finite; {saved}",
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
            "step": number, "tokens": self._samples_after(number) * spec.sequence_length, "train/loss": outcome.loss,
            "train/grad_norm": outcome.norm, "train/lr": self.trainer.rate(number),
            **speed(spec.tokens_per_step, self.times[-1], self.rank.world, self.options.predicted),
            "mem/predicted_gib": gib(self.options.predicted.allocated_bytes),
        }  # fmt: skip
        if self.measured:
            row["mem/measured_gib"] = gib(self.measured)
        row |= {f"train/{term.removesuffix('_loss')}_loss": amount for term, amount in outcome.auxiliary_losses.items()}
        if self.trainer.repeated is not None:
            row["train/exact_rows"] = number in self.trainer.repeated.exact_steps
        if outcome.loss_scale:
            row |= {"train/loss_scale": outcome.loss_scale, "train/skipped": outcome.skipped}
        every = spec.train.validation_every
        if len(self.validation) and (_every(every, number) or (every and last)):
            with self.rank.progress.during("validate"):
                row["val/loss"] = self.trainer.validate(self.validation)
        return row

    def _samples_after(self, step: int) -> int:
        """The samples that were trained on when `step` is done."""
        return self.samples_before + (step - self.first + 1) * self.spec.layout.global_batch_size

    def _extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` says of its run, beside the state."""
        extra = {"step": step, "samples": self._samples_after(step), "layout": asdict(self.spec.layout)}
        data = {"data": dict(self.train.fingerprint()), "stream": dict(self.train.position(extra["samples"]))}
        return extra | data | resume_settings(self.spec)

    def _print_grace(self) -> None:
        """Say once if a stop may take too long. The first two steps of a run are slower than the others."""
        if self.rank.number == 0 and self.times[2:] and (line := self.grace.line(median(self.times[-20:]))):
            log.warning("%s", line)

    # ---- the end ---------------------------------------------------------------------------------------------

    def _finish(self, table: LiveTable | None, compare: Comparison | None) -> dict[str, Any]:
        self.trainer.run.settle_parameters()  # no collective may be under way when a process ends
        with self.rank.progress.during("validate"):  # text is written by forward passes
            text = self._text()
        result = self._result()
        if table is None:
            return result
        if compare is not None:
            result |= compare.result(self.first, self.losses)
        table.close()
        out = sys.stderr if self.options.as_json else sys.stdout
        if text:
            print(f'\nThe model continues "{_PROMPT}": {_printable(text.removeprefix(_PROMPT))}\n', file=out)
        if compare is not None:
            print(compare.line(result), file=out)
        if self.losses:
            table.finish(self.losses[0], self.losses[-1], sum(self.times), self.options.folder)
        return result

    def _text(self) -> str:
        if not self.spec.train.sample_tokens or not self.losses:
            return ""
        prompt = [int(i) for i in self.tokenizer.encode(_PROMPT)] or [self.tokenizer.end_of_document]
        ids = write(self.trainer, prompt, self.spec.train.sample_tokens, seed=self.spec.train.seed)
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])

    def _result(self) -> dict[str, Any]:
        tokens = self.spec.tokens_per_step / median(self.times[2:] or self.times) if self.times else 0.0
        memory = {
            "predicted_gib": gib(self.options.predicted.allocated_bytes),
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

    def _title(self) -> str:
        """Above the table of steps."""
        lay = self.spec.layout
        degrees = " ".join(f"{a}={getattr(lay, a)}" for a in ("dp", "tp", "pp", "cp", "ep"))
        n = sum(math.prod(q.shape) for q in self.trainer.program.everything)
        how = f"{self.spec.precision.policy} · {self.rank.device}"
        return f"{self.spec.model.name}, {show_count(n)} parameters · {degrees} · {how}"


def _every(n: int, number: int) -> bool:
    """Whether step `number` is one of every n; never when n is 0."""
    return n > 0 and number % n == 0


def _printable(text: str) -> str:
    """Text of a model without what would move the cursor or change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def closing_line(result: dict[str, Any]) -> str:
    """The last line of `--json`."""
    return json.dumps(result)


def set_up(spec: RunSpec) -> None:
    """Set up logging, and turn autograd off; on every rank before it starts."""
    logging.basicConfig(level=spec.train.log_level.upper(), format="%(message)s", stream=sys.stderr)
    torch.set_grad_enabled(False)

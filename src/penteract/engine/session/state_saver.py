"""When and how the state of a run is saved: checked first, at once or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penteract.engine.rank.rank import Rank
from penteract.engine.rank.stopping import Stopping
from penteract.engine.session.background.background_saves import BackgroundSaves
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.grace import Grace
from penteract.engine.session.saved import state_slices
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadNumerics


@dataclass(slots=True)
class StateSaver:
    """The saves of one rank. All methods are called by every rank.

    extra       what a checkpoint of a step says of its run
    every       steps between saves; 0: only at the end
    background  None: the run waits for each save
    due         a save that starts once the one under way has ended
    checked     the last step after which replicas were compared
    """

    trainer: Trainer
    checkpoints: Checkpoints
    stopping: Stopping
    grace: Grace
    extra: Callable[[int], dict[str, Any]]
    every: int
    background: BackgroundSaves | None = None
    due: bool = False
    checked: int = 0
    _began: float = 0.0  # when the save under way did

    @property
    def rank(self) -> Rank:
        """Whose saves these are."""
        return self.checkpoints.rank

    def check(self, step: int) -> None:
        """Compare what ranks hold alike. Raises BadNumerics on all ranks where it differs: nothing is saved then."""
        if self.checked == step:
            return
        self.trainer.run.settle_parameters()
        differing = self.trainer.run.check.differing()
        found = torch.tensor(len(differing))
        self.rank.largest(found)
        if found:
            error = None
            if differing:
                name, ranks = next(iter(differing.items()))
                some = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
                error = BadNumerics("REPLICAS", f"replicas of the state differ after step {step}: nothing is saved",
                                    where=name, found=f"other bytes on rank {some}",
                                    fix="look at the memory of these devices; --resume continues from the last "
                                    "checkpoint")  # fmt: skip
            error = self.rank.one_of(error)
            assert error is not None
            raise error
        self.trainer.run.check.remember()
        self.checked = step

    def save_due(self, number: int) -> None:
        """After step `number`: save where it is time to. In the background one save goes on at a time: one that is due
        meanwhile starts after the step by which it has ended on all ranks."""
        if self.background is not None and self.background.under_way:
            self.background.poll()
            if not self.background.under_way:
                self.grace.saved = time.perf_counter() - self._began
        if not (self.due or (self.every > 0 and number % self.every == 0)):
            return
        if self.background is not None:
            under_way = torch.tensor(int(self.background.under_way))
            self.rank.largest(under_way)
            self.due = bool(under_way)
        if not self.due:
            self.save(background=self.background)

    def save(self, *, prune: bool = True, background: BackgroundSaves | None = None) -> None:
        """Save the state, unless it is saved already. Its step comes from the device, which may have been told of later
        steps that did not change it. Wait until it is saved, also for a save under way, unless it goes on in the
        `background`."""
        trainer = self.trainer
        if self.background is not None and background is None:
            with self.rank.progress.during("save"), self.stopping.held():
                self.background.finish(prune=prune)
                self.rank.barrier()  # no writer is in the folder any more that rank 0 clears for the next save
        trainer.run.settle_parameters()
        step = int(trainer.run.done)
        if step == self.checkpoints.last:
            return
        self.check(step)
        trainer.check_unreplicated(step + 1)  # that step may have begun, and have found something
        if not trainer.weights_are_finite():
            raise BadNumerics("NUMERICS", f"an update made weights that are not finite: step {step} is not saved",
                              where=f"rank {self.rank.number}",
                              fix="a smaller --optimizer.learning_rate; --resume continues from the last checkpoint, "
                              "if there is one")  # fmt: skip
        extra = self.extra(step)
        at = time.perf_counter()
        with self.rank.progress.during("save"), self.stopping.held():
            if background is not None:
                self._began = at
                return background.start(step, extra)
            self.checkpoints.save(step, state_slices(trainer.program, trainer.state), extra, prune=prune)
        self.grace.saved = time.perf_counter() - at

    def close(self) -> None:
        """After the last save."""
        self.checkpoints.close()
        if self.background is not None:
            self.background.close()
        self.checkpoints.end_epoch()

    @contextmanager
    def ending_writer(self) -> Iterator[None]:
        """No writer outlives the loop."""
        try:
            yield
        except BaseException:
            if self.background is not None:
                self.background.writer.kill()
            raise

"""Draws of damage to a run's checkpoints, and what a resume makes of each: the state of a whole step, or a refusal."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import forks
from penteract.config.resolve.resolved_run import resolve
from penteract.engine.checkpoint import committed
from penteract.engine.checkpoint.folder import step_folder
from penteract.engine.rank.rank import Rank
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.saved import load_state
from penteract.engine.session.trainer import Trainer
from penteract.errors import BadInput, CorruptData

STEPS = (2, 4, 6)
SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=2", "--checkpoint.keep=0",
    "--checkpoint.asynchronous=false",
)  # fmt: skip
PAGE = 4096
UNLIKE = 7.0  # what the state holds before a load

# Kinds of damage to one file, and to a whole step.
FILE = ("flip", "burst", "zeros", "truncate", "extend", "remove", "stale", "garbage", "empty", "a link")
STEP = ("swap", "number", "twice")


@dataclass(slots=True)
class Outcome:
    """`kinds`: what was done, with the file; `result`: "step N" or the code of the refusal. `wrong`: what is not as it
    must be; "" if nothing."""

    kinds: list[str]
    result: str = ""
    wrong: str = ""


@dataclass(slots=True)
class Damage:
    """A run of two ranks with three steps, and a trainer of one rank that loads them. `clean`: step -> its state."""

    at: Path
    trainer: Trainer = field(init=False)
    clean: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])

    def __post_init__(self) -> None:
        words = ["train", *SMALL, f"--steps={STEPS[-1]}", "--parallel.dp=2", "--parallel.zero=1",
                 f"--output.folder={self.at}"]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        done = forks.penteract(words, environment)
        assert done.returncode == 0, done.stderr
        assert [c.step for c in committed(self.source)] == sorted(STEPS, reverse=True)
        rank = Rank(0, 1, torch.device("cpu"), None)
        self.trainer = Trainer.build(resolve(None, "tiny", [*SMALL[1:]], world=1).run, rank)
        for step in STEPS:
            with self.copy() as run:
                for other in STEPS:
                    if other != step:
                        shutil.rmtree(step_folder(run / "checkpoints", other))
                assert self.resumed(run) == f"step {step}"
            self.clean[step] = [x.clone() for x in self.state()]

    @property
    def source(self) -> Path:
        """The checkpoints that are not touched."""
        return self.at / "latest" / "checkpoints"

    def copy(self) -> Copy:
        """A run's folder of its own."""
        return Copy(self.source, self.at / "copy")

    def state(self) -> list[torch.Tensor]:
        """Master weights and moments as they are kept."""
        state = self.trainer.state
        kinds = ("master", "mean", "square")
        return [kept for flat in state.flats for kind in kinds if (kept := flat.kept(kind)) is not None]

    def resumed(self, run: Path) -> str:
        """The step that is loaded, as a resumed run loads it; or the code with which it is refused."""
        for kept in self.state():
            kept.fill_(UNLIKE)
        kept = Checkpoints(run / "checkpoints", Rank(0, 1, torch.device("cpu"), None), keep=0, epoch=9)

        def load(at: Path) -> dict[str, Any]:
            return load_state(at, self.trainer.program, self.trainer.state)

        try:
            kept.begin()
            extra = kept.load(load)
        except (BadInput, CorruptData) as e:
            return e.code
        return f"step {int(extra['step'])}"

    def draw(self, number: int, seed: int) -> Outcome:
        """Draw `number`: damage a copy, resume from it, and compare."""
        dice = random.Random(f"{seed} corruption {number}")
        with self.copy() as run:
            kinds, touched = list[str](), set[int]()
            for _ in range(dice.choice((1, 1, 1, 2, 3))):
                kind, steps = _damage(run / "checkpoints", dice)
                kinds.append(kind)
                touched |= steps
            outcome = Outcome(kinds)
            try:
                outcome.result = self.resumed(run)
            except Exception as e:  # whatever else it raises is a fault
                outcome.result = outcome.wrong = f"{type(e).__name__}: {e}"[:300]
                return outcome
        outcome.wrong = self.problem(outcome.result, touched)
        return outcome

    def problem(self, result: str, touched: set[int]) -> str:
        """What is wrong with a result, if these steps were touched."""
        whole = [step for step in STEPS if step not in touched]
        if not result.startswith("step "):
            return f"refused with {result}, though step {whole[-1]} is whole" if whole else ""
        step = int(result.removeprefix("step "))
        if whole and step < whole[-1]:
            return f"went back to step {step}, though step {whole[-1]} is whole"
        same = step in self.clean and all(
            torch.equal(now, then) for now, then in zip(self.state(), self.clean[step], strict=True)
        )
        return "" if same else f"the state is not that of step {step}: the damage is silent"


@dataclass(slots=True)
class Copy:
    """A run's folder that lasts as long as the context."""

    source: Path
    at: Path

    def __enter__(self) -> Path:
        shutil.rmtree(self.at, ignore_errors=True)
        shutil.copytree(self.source, self.at / "checkpoints")
        return self.at

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.at, ignore_errors=True)


def _damage(folder: Path, dice: random.Random) -> tuple[str, set[int]]:
    """(what was done, the steps that it touched)."""
    step = dice.choice(STEPS)
    at = step_folder(folder, step)
    kind = dice.choice((*FILE * 3, *STEP))
    if not at.is_dir():  # renamed by an earlier damage
        return "nothing", {step}
    if kind in STEP:
        return _damage_step(folder, kind, step, dice)
    names = sorted(p.name for p in _files(at))
    if not names:
        return "nothing", {step}
    path = at / dice.choice(names)
    what = f"{kind} of {path.name if path.suffix != '.safetensors' else 'a rank file'}"
    data = bytearray(path.read_bytes())
    place = dice.randrange(len(data)) if data else 0
    if kind == "flip" and data:
        data[place] ^= 1 << dice.randrange(8)
    elif kind == "burst":
        noise = dice.randbytes(dice.randint(1, 64))
        data[place : place + len(noise)] = noise[: len(data) - place]
    elif kind == "zeros":
        page = place // PAGE * PAGE
        data[page : page + PAGE] = bytes(len(data[page : page + PAGE]))
    elif kind == "truncate":
        del data[place:]
    elif kind == "extend":
        data += dice.randbytes(dice.randint(1, PAGE))
    elif kind == "garbage":
        data = bytearray(dice.randbytes(len(data)))
    elif kind == "empty":
        data.clear()
    elif kind == "stale":
        other = step_folder(folder, dice.choice([s for s in STEPS if s != step])) / path.name
        data = bytearray(other.read_bytes()) if other.is_file() else data
    path.unlink()
    if kind == "a link":
        path.symlink_to("/dev/null")
    elif kind != "remove":
        path.write_bytes(data)
    return what, {step}


def _damage_step(folder: Path, kind: str, step: int, dice: random.Random) -> tuple[str, set[int]]:
    at = step_folder(folder, step)
    if kind == "swap":
        first, second = at / "rank-00000.safetensors", at / "rank-00001.safetensors"
        if first.is_file() and second.is_file():
            first.rename(at / "third")
            second.rename(first)
            (at / "third").rename(second)
        return "two rank files are swapped", {step}
    free = dice.choice([1, 3, 5, 7, 90])
    if step_folder(folder, free).exists():
        return "nothing", {step}
    if kind == "number":
        at.rename(step_folder(folder, free))
        return "a step has another number", {step}
    shutil.copytree(at, step_folder(folder, free), symlinks=True)
    return "a step is there twice, under another number", {step}


def _files(at: Path) -> Iterator[Path]:
    """Regular files: a link is not written through."""
    return (p for p in at.iterdir() if p.is_file() and not p.is_symlink())

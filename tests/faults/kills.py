"""Draws of kills: a run is killed at a random moment, once or several times, and resumed until it ends. It must end
bitwise as one that nothing disturbed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
from penteract.engine.checkpoint import committed, verify
from penteract.errors import PenteractError
from run_records import children, digests, rows_so_far, steps_of

STEPS = 30
SMALL = (
    "--preset={preset}", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=2", f"--steps={STEPS}",
)  # fmt: skip
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one rank": (),
    "dp 2": ("parallel.dp=2",),
    "dp 2, ZeRO 1": ("parallel.dp=2", "parallel.zero=1"),
    "dp 2, ZeRO 2": ("parallel.dp=2", "parallel.zero=2"),
    "dp 2, ZeRO 3": ("parallel.dp=2", "parallel.zero=3"),
    "tp 2": ("parallel.tp=2",),
    "cp 2": ("parallel.cp=2",),
    "pp 2": ("parallel.pp=2",),
    "pp 2, vpp 2": ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=interleaved"),
    "ep 2": ("preset=tiny-moe", "parallel.dp=2", "parallel.ep=2"),
    "dp 2, bf16": ("parallel.dp=2", "parallel.zero=1", "precision.dtype=bf16"),
    "dp 2, tp 2": ("parallel.dp=2", "parallel.tp=2", "parallel.zero=3"),
}
VICTIMS = ("a rank", "rank 0", "the launcher", "all")
MOST_KILLS = 3
_START_S = 90.0  # for the first step of a run
_END_S = 120.0  # without a new row, for a run to end by itself: how long steps take is the machine's affair
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# One thread each: on a busy machine, threads of one rank that wait for each other take ten times as long.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in _PLACE} | {"OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Outcome:
    """`kills`: who was killed each time, and when. `anew`: starts without a checkpoint to resume. `wrong`: what is not
    as it must be; "" if nothing."""

    layout: str
    kills: list[str] = field(default_factory=list[str])
    anew: int = 0
    wrong: str = ""


class Wrong(Exception):
    """What is not as it must be."""


@dataclass(slots=True)
class Whole:
    """A run that nothing disturbed. `seconds`: from its first step to its end."""

    losses: list[Any]
    digests: dict[str, list[str]]
    seconds: float


@dataclass(slots=True)
class Kills:
    """Draws in the folder `at`. The whole run of a layout is made when it is first drawn."""

    at: Path
    wholes: dict[str, Whole] = field(default_factory=dict[str, Whole])

    def draw(self, number: int, seed: int) -> Outcome:
        """Draw `number`: kill, resume, compare."""
        dice = random.Random(f"{seed} kill {number}")
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        outcome, folder = Outcome(layout), self.at / "killed"
        try:
            whole = self.whole(layout)
            self._run(folder, outcome, whole, dice)
            self._compare(folder, whole)
        except (Wrong, PenteractError) as e:
            outcome.wrong = str(e)[:1000]
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def whole(self, layout: str) -> Whole:
        """The run of a layout that nothing disturbs; it waits for its saves."""
        if layout not in self.wholes:
            folder = self.at / "whole"
            words = [*_words(folder, layout), "--checkpoint.asynchronous=false"]
            with forks.begun(words, _ENVIRONMENT) as command:
                _first_step(folder, command, 0)
                begun = time.monotonic()
                done = command.result(_END_S)
                seconds = time.monotonic() - begun
            if done.returncode:
                raise Wrong(f"an undisturbed run ended with {done.returncode}: {done.stderr[-500:]}")
            self.wholes[layout] = Whole(steps_of(folder / "latest"), _last_digests(folder), seconds)
            shutil.rmtree(folder)
        return self.wholes[layout]

    def _run(self, folder: Path, outcome: Outcome, whole: Whole, dice: random.Random) -> None:
        """Start, kill and resume until the run is over."""
        left = dice.choice((1, 1, 2, MOST_KILLS))
        while True:
            words = [*_words(folder, outcome.layout), "--checkpoint.asynchronous=true"]
            if _held(folder):
                words = ["train", f"--resume={(folder / 'latest').resolve()}"]
            elif (folder / "latest").exists():
                outcome.anew += 1
            with forks.begun(words, _ENVIRONMENT) as command:
                if left:
                    outcome.kills.append(_kill(folder, command, whole, dice))
                    left -= 1
                _await_end(folder, command, outcome)
                done = command.result()
            _check_end(done.returncode, done.stderr, outcome)
            if done.returncode == 0 or _over(folder):
                return

    def _compare(self, folder: Path, whole: Whole) -> None:
        if (losses := steps_of(folder / "latest")) != whole.losses:
            odd = next((pair for pair in zip(losses, whole.losses, strict=False) if pair[0] != pair[1]), len(losses))
            raise Wrong(f"its losses differ from those of an undisturbed run: {odd}")
        if _last_digests(folder) != whole.digests:
            raise Wrong("its last checkpoint differs from that of an undisturbed run")
        for one in committed(folder / "latest" / "checkpoints"):
            verify(one.at)


def _words(folder: Path, layout: str) -> list[str]:
    given = dict(word.split("=") for word in LAYOUTS[layout])
    preset = given.pop("preset", "tiny")
    own = [f"--{key}={value}" for key, value in given.items()]
    return ["train", *(word.format(preset=preset) for word in SMALL), *own, f"--output.folder={folder}"]


def _first_step(folder: Path, command: forks.Command, before: int) -> None:
    """Wait until a step is done, or the run has ended."""
    end = time.monotonic() + _START_S
    while rows_so_far(folder / "latest") <= before and command.process.is_alive():
        if time.monotonic() > end:
            raise Wrong(f"no step in {_START_S:.0f} s: {command.err.read_text()[-500:]}")
        time.sleep(0.005)


def _await_end(folder: Path, command: forks.Command, outcome: Outcome) -> None:
    """Wait until it has ended, or does nothing any more."""
    rows, last = rows_so_far(folder / "latest"), time.monotonic()
    while command.process.is_alive():
        if (now := rows_so_far(folder / "latest")) != rows:
            rows, last = now, time.monotonic()
        if time.monotonic() - last > _END_S:
            said = command.err.read_text()[-500:]
            raise Wrong(f"neither a row nor an end for {_END_S:.0f} s after {outcome.kills}, at row {rows}: {said}")
        time.sleep(0.02)


def _kill(folder: Path, command: forks.Command, whole: Whole, dice: random.Random) -> str:
    """Kill at a random moment: mostly while it trains, at times while it starts."""
    who, starting, share = dice.choice(VICTIMS), dice.random() < 0.2, dice.random()
    if starting:
        time.sleep(3.0 * share)
    else:
        _first_step(folder, command, rows_so_far(folder / "latest") if _held(folder) else 0)
        time.sleep(whole.seconds * share)
    launcher = command.process.pid or 0
    ranks = children(launcher)
    if not command.process.is_alive():
        return "nobody: it had ended"
    victims = {"rank 0": ranks[:1], "the launcher": [launcher], "all": [*ranks, launcher]}.get(who)
    for pid in victims if victims is not None else [dice.choice(ranks)] if ranks else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return f"{who}, after row {rows_so_far(folder / 'latest')}" if not starting else f"{who}, in its first seconds"


def _check_end(code: int, said: str, outcome: Outcome) -> None:
    """72 where a rank was killed, and in one line; the signal where the launcher was."""
    if code not in (0, 72, -signal.SIGKILL):
        raise Wrong(f"it ended with {code} after {outcome.kills}: {said[-500:]}")
    if "Traceback" in said or said.count("error[") > 1:
        raise Wrong(f"it said more than one line after {outcome.kills}: {said[-500:]}")
    if code == 72 and "error[LOST]" not in said:
        raise Wrong(f"it did not name the rank that was killed after {outcome.kills}: {said[-500:]}")


def _held(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return bool(committed(folder / "latest" / "checkpoints"))


def _over(folder: Path) -> bool:
    """Whether the last step is saved: it was killed after its end."""
    found = committed(folder / "latest" / "checkpoints")
    return bool(found) and found[0].step == STEPS


def _last_digests(folder: Path) -> dict[str, list[str]]:
    newest = committed(folder / "latest" / "checkpoints")[0]
    if newest.step != STEPS:
        raise Wrong(f"its newest checkpoint is of step {newest.step}")
    return digests(newest.at)

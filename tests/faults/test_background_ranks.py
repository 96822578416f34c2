"""Saves in the background of several ranks, as users start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import forks
from penteract.engine.checkpoint import committed, manifest, verify

pytestmark = pytest.mark.waits(23)

SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--parallel.dp=2",
)  # fmt: skip
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}


def digests(run: Path) -> dict[int, list[tuple[str, str]]]:
    """step -> name and digest of each rectangle, and which file has it."""
    found = dict[int, list[tuple[str, str]]]()
    for one in committed(run / "checkpoints"):
        verify(one.at)
        tensors = manifest.read(one.at).tensors
        found[one.step] = [(part.key + part.file, part.digest) for e in tensors.values() for part in e.parts]
    return found


def test_what_two_ranks_save_is_what_they_save_at_once(tmp_path: Path) -> None:
    """ZeRO 3, with the optimizer on the host, in two halves of 16 bits."""
    how = (
        *SMALL,
        "--parallel.zero=3",
        "--memory.offload_optimizer=true",
        "--precision.dtype=bf16",
        "--steps=8",
        "--checkpoint.keep=0",
    )
    runs = list[Path]()
    for name, words in (("one", ("--checkpoint.every=1", "--checkpoint.asynchronous=false")),
                        ("other", ("--checkpoint.every=2", "--checkpoint.asynchronous=true"))):  # fmt: skip
        done = forks.penteract(["train", *how, *words, f"--output.folder={tmp_path / name}"], ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / name / "latest")
    at_once, later = map(digests, runs)
    assert set(later) > {8}
    assert later == {step: at_once[step] for step in later}


def _without_writer(words: list[str], order: str) -> int:
    """`penteract WORDS` in which rank 1's writers do nothing, or are killed as soon as they start. Those of rank 0 have
    started before anything is asked: no limit counts how long a busy machine needs for that."""
    from penteract.engine.checkpoint.background import writer

    real = writer.spawned

    def spawned(words: Sequence[str], files: Sequence[int]) -> writer.Process:
        if os.environ.get("RANK") != "1":
            process, end = real(words, files), time.monotonic() + 60
            while "numpy" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < end:
                time.sleep(0.02)
            return process
        wait = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = subprocess.Popen(wait, pass_fds=tuple(files))
        if order == "killed":
            process.send_signal(signal.SIGKILL)
        return process

    defaults = writer.BackgroundWriter.__init__.__defaults__
    writer.BackgroundWriter.__init__.__defaults__ = (spawned, *(defaults or ())[1:])
    return forks._command(words, None)


@pytest.mark.parametrize(
    ("order", "why", "code"),
    [
        ("hangs", "rank 1 has not written its part", 0),  # until after the last step
        ("killed", "rank 1 has not written its part: its writer ended by SIGKILL", 74),
    ],
)
def test_a_rank_whose_part_is_missing(tmp_path: Path, order: str, why: str, code: int) -> None:
    """One save is dropped, and said once; the run goes on to its end, or to the second."""
    steps = 12 if code == 0 else 5000  # it ends long before these, by its second save
    words = ["train", *SMALL, f"--steps={steps}", "--checkpoint.every=2", "--checkpoint.asynchronous=true"]
    words += [f"--checkpoint.keep={0 if code == 0 else 2}"]  # there need be no room for all that it will not save
    words += ["--limits.save=12", f"--output.folder={tmp_path}"]
    out, err = tmp_path / "out", tmp_path / "err"
    process = forks.start(_without_writer, words, order, environment=ENVIRONMENT, out=out, err=err)
    process.join(200)
    said = err.read_text()
    assert process.exitcode == code, said
    assert said.count("training goes on") == 1
    assert why in said
    saved = [one.step for one in committed(tmp_path / "latest" / "checkpoints")]
    assert saved == ([12] if code == 0 else [])
    assert ("so was the one before" in said) == (code == 74)

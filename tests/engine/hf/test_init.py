"""A run that starts from weights, as a person starts it: from a folder of ours, and from Hugging Face's."""

from __future__ import annotations

import json
import os
from math import log
from pathlib import Path
from typing import Any

import pytest

import forks
from engine.hf import folders
from penteract.cli import main

SMALL = (
    "--batch.sequence_length=32", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0",
)  # fmt: skip


def train(out: Path, *words: object) -> dict[str, Any]:
    """The closing line of one step."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = ["train", "--json", "--steps=1", *SMALL, f"--output.folder={out}"]
    done = forks.penteract([*command, *map(str, words)], env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_start_a_run_on_any_layout(tmp_path: Path, capsys: Any) -> None:
    theirs = folders.write(tmp_path / "hf", "mixtral", files=3)
    assert main(["convert", str(theirs), str(tmp_path / "ours")]) == 0
    one = train(tmp_path / "runs", "--init", tmp_path / "ours")
    four = train(tmp_path / "runs", "--init", theirs, "--parallel.dp=2", "--parallel.ep=2", "--parallel.zero=1")
    assert one["loss_first"] > log(272) + 1  # no start of ours is as far off
    assert four["loss_first"] == pytest.approx(one["loss_first"], rel=1e-5)
    remembered = json.loads((Path(four["run_dir"]) / "init.json").read_text())
    assert remembered == {"from": str(theirs), "vocab_size": "272"}

"""A process that reaches the ranks' store writes to it while they train: it ends nothing, and learns no key."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

import forks
from penteract.engine.rank.run_key import VARIABLE, new_key

pytestmark = pytest.mark.waits(12)

STEPS = 150


def test_a_stranger_in_the_store_ends_no_run(tmp_path: Path) -> None:
    secret, port = new_key(), forks.free_port()
    words = [
        "train", "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--parallel.dp=2",
        f"--steps={STEPS}", f"--output.folder={tmp_path / 'runs'}", "--training.validation_every=0",
    ]  # fmt: skip
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, VARIABLE: secret}
    with ExitStack() as stack:
        started = [
            stack.enter_context(forks.begun(words, os.environ | {k: str(v) for k, v in (place | own).items()}))
            for own in ({"RANK": r, "LOCAL_RANK": r} for r in range(2))
        ]
        metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
        end = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        beat = next(name for name in stranger.list_keys() if name.endswith("watch/beat/1"))
        assert secret.encode() not in stranger.get(beat)
        watch = beat.removesuffix("beat/1")
        for row in ({"code": "BUG", "exit_code": 70, "rank": 1, "what": "forged", "where": "", "fix": ""}, "nonsense"):
            stranger.set(f"{watch}abort", json.dumps(row))
            stranger.set(f"{watch}done/1", "1")
            stranger.set(f"{watch}beat/0", stranger.get(beat))  # signed, under another name
            time.sleep(0.6)
        done = [command.result() for command in started]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert sum('"step"' in line for line in metrics.read_text().splitlines()) == STEPS
    (line,) = [line for line in done[0].stderr.splitlines() if "watch/abort" in line]
    assert line.startswith("rank 0 refuses a row of the ranks' store that this run has not signed, and goes on")
    assert f"watch/abort at 127.0.0.1:{port} · found no signature · fix: " in line
    written = [p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(written) > 5
    printed = "".join(one.stdout + one.stderr for one in done).encode()
    assert all(secret.encode() not in text for text in [*written, printed])


def test_ranks_without_a_key_say_so_once(tmp_path: Path) -> None:
    words = ["train", "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--parallel.dp=2",
             "--steps=1", f"--output.folder={tmp_path / 'runs'}", "--training.validation_every=0"]  # fmt: skip
    done = forks.ranks([words] * 2, os.environ)
    assert [one.returncode for one in done] == [0, 0]
    said = [line for one in done for line in one.stderr.splitlines() if "are not signed" in line]
    assert len(said) == 1 and f'fix: export {VARIABLE}="$(openssl rand -hex 32)" for all ranks' in said[0]

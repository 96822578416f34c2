"""The batch file of a run as bash runs it: words arrive as they are, and jobs are queued again where that helps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measure.slurm.batches import PLAIN, of_run

NASTY = "a'b\"c $(touch gone) `touch gone` ; touch gone # \\ ü"
Fake = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def job(tmp_path: Path) -> Fake:
    """Runs a batch file as Slurm would, with commands of ours: `srun` runs rank 0's words, `scontrol` notes its own."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in (("srun", 'while [ "$1" != rank ]; do shift; done; shift; exec "$@"'),
                       ("scontrol", f'echo "$@" >> {tmp_path}/asked')):  # fmt: skip
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)

    def run(batch: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
        return subprocess.run(["bash", "-s"], input=batch, env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=60, check=False)  # fmt: skip

    return run


def test_words_arrive_as_they_are(job: Fake, tmp_path: Path) -> None:
    echo = tmp_path / "echo.py"
    echo.write_text("import sys, json; json.dump(sys.argv[1:], open('said.json', 'w'))")
    run = tmp_path / f"a {NASTY}"
    (run / "slurm").mkdir(parents=True)
    batch = of_run(replace(PLAIN, python=f"python3 {echo}"), 1, (f"--data.source={NASTY}",), run)
    assert job(batch).returncode == 0
    want = ["-m", "penteract", "train", f"--data.source={NASTY}", f"--into={run}", "--grace=120"]
    assert json.loads((tmp_path / "said.json").read_text()) == want
    assert not (tmp_path / "gone").exists() and not (tmp_path / "asked").exists()


LEAVES = """
import json, os, pathlib, sys
run, leaves = pathlib.Path("r"), json.loads(os.environ["LEAVES"])
if "status" in leaves: (run / "status.json").write_text(json.dumps(leaves["status"]) + "\\n")
if "row" in leaves:
    with (run / "errors.jsonl").open("a") as file: file.write(json.dumps({"rank": 0, "exit_code": leaves["row"], "time": "x"}) + "\\n")
os.kill(os.getpid(), -leaves["code"]) if leaves["code"] < 0 else sys.exit(leaves["code"])
"""  # noqa: E501


@pytest.mark.parametrize(
    ("leaves", "code", "again"),
    [
        ({"status": {"exit_code": 0}, "code": 0}, 0, False),
        ({"status": {"exit_code": 75}, "code": 75}, 75, True),
        ({"status": {"exit_code": 72}, "code": 72}, 72, True),
        ({"status": {"exit_code": 71}, "code": 72}, 71, False),  # another rank had no memory; rank 0 lost a peer
        ({"status": {"exit_code": 73}, "code": 1}, 73, False),
        ({"code": 2}, 2, False),  # refused before it began: status.json is that of the start before
        ({"row": 72, "code": 137}, 72, True),  # rank 0 was killed; the others said so
        ({"row": 71, "code": 137}, 71, False),
        ({"code": -10}, 75, True),  # asked to stop while its interpreter began
        ({"code": -9}, 137, False),
    ],
)
def test_what_is_queued_again(job: Fake, tmp_path: Path, leaves: dict[str, Any], code: int, again: bool) -> None:
    run = tmp_path / "r"
    (run / "slurm").mkdir(parents=True)
    (run / "status.json").write_text('{"state": "stopped", "exit_code": 75}\n')
    (run / "errors.jsonl").write_text('{"rank": 0, "exit_code": 72}\n')
    (tmp_path / "leaves.py").write_text(LEAVES)
    batch = of_run(replace(PLAIN, python=f"python3 {tmp_path / 'leaves.py'}"), 1, run=run)
    done = job(batch, LEAVES=json.dumps(leaves))
    assert done.returncode == code
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("requeue 7\n" if again else "")


def test_a_lost_peer_is_tried_again_a_few_times_without_a_new_checkpoint(job: Fake, tmp_path: Path) -> None:
    run = tmp_path / "r"
    (run / "slurm").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (tmp_path / "leaves.py").write_text(LEAVES)
    batch = of_run(replace(PLAIN, python=f"python3 {tmp_path / 'leaves.py'}", retries=2), 1, run=run)

    def again(number: int) -> bool:
        leaves = json.dumps({"status": {"exit_code": 72, "start": number}, "code": 1})
        assert job(batch, LEAVES=leaves).returncode == 72
        found = (tmp_path / "asked").exists()
        (tmp_path / "asked").unlink(missing_ok=True)
        return found

    assert [again(n) for n in range(4)] == [True, True, False, False]
    (run / "checkpoints" / "latest").write_text("step-00000005\n")
    assert [again(n) for n in range(4, 7)] == [True, True, False]

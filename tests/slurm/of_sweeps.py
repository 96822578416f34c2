"""Sweeps under Slurm. Of twelve cases one fails, one has too little memory, one hangs, one loses its node, and the
others train. The process of the sweep is killed on the way, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penteract.cli import main
from penteract.measure.schemas.sweep import CaseStatus
from penteract.measure.schemas.sweep_folder import SweepFolder
from slurm.cluster import NODES, Cluster, wait
from slurm.keeper import belonging

SWEEP = """
preset = "tiny"
steps = 1
warmup = 1
limit = 150
ranks = 1
[set]
model.layers = 1
batch.sequence_length = 32
batch.global_batch_size = 4
precision.device = "cpu"
slurm.exclusive = false
slurm.ranks_per_node = 1
slurm.memory = "2500M"       # so that four run at once, of 6000 MiB a node: beginning takes a core some seconds
[grid]
optimizer.learning_rate = [1e-4, 2e-4]
kernels.loss = ["chunked", "reference"]
training.seed = [1, 2]
[[case]]
kernels.elementwise = "triton"
[[case]]
model.vocab_size = 4000000
model.hidden_size = 256
[[case]]
training.seed = 3
limit = 30
[[case]]
training.seed = 4
"""
FAILS, FULL, HANGS, LOSES = (f"{n:03d}" for n in (9, 10, 11, 12))


BARE = """
preset = "tiny"
steps = 1
warmup = 1
limit = 150
ranks = 1
[set]
model.layers = 1
batch.sequence_length = 32
batch.global_batch_size = 4
precision.device = "cpu"
slurm.exclusive = false
slurm.ranks_per_node = 1
slurm.memory = "1500M"
[[case]]
training.seed = 1
[[case]]
model.vocab_size = 4000000
model.hidden_size = 256
"""


def of(sweep: SweepFolder, number: str) -> tuple[str, CaseStatus]:
    (name,) = (name for name in sweep.settings().cases if name.startswith(number))
    return name, sweep.case(name).status()


def ranks_of(slurm: Cluster, case: str) -> list[int]:
    """Processes of a case's ranks, by what they run."""
    found = list[int]()
    for pid in belonging(f"SLURM_CONF={slurm.folder / 'slurm.conf'}", slurm.folder):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"rank_process" in line and f"/{case}\0".encode() in line and b"srun" not in line:
            found.append(pid)
    return found


def stopped(slurm: Cluster, sweep: SweepFolder, number: str) -> None:
    """Stop the rank of a case as soon as there is one: it hangs."""
    name, _ = of(sweep, number)
    wait(lambda: ranks_of(slurm, name), 200, f"a rank of {name}")
    for pid in ranks_of(slurm, name):
        os.kill(pid, signal.SIGSTOP)


def start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "penteract", "bench", *words], stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL, stderr=Path("bench.log").open("ab"))  # fmt: skip


def test_twelve_cases(slurm: Cluster, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sweep.toml").write_text(SWEEP)
    assert main(["bench", "sweep.toml", "--slurm", "--dry-run", "--usd-per-gpu-hour", "2"]) == 0
    printed = capsys.readouterr().out
    assert "--array=0-10" in printed and "--array=0-0" in printed and " USD at 2 USD a rank-hour" in printed

    sweep = SweepFolder(here / "sweeps" / "sweep")
    process = start("sweep.toml", "--slurm")
    try:
        wait(lambda: sweep.exists, 60, "the sweep's folder")
        wait(lambda: any(row.status.state == "done" for row in sweep.read().rows), 150, "a case that is done")
        process.kill()
        process.wait()
        process = start(str(sweep.path))  # it goes on, also with Slurm
        stopped(slurm, sweep, HANGS)
        stopped(slurm, sweep, LOSES)
        wait(lambda: of(sweep, HANGS)[1].state == "timed out", 150, "the end of a case that hangs")
        name, _ = of(sweep, LOSES)
        handle = sweep.case(name).handle(1)
        assert handle is not None and handle.launcher == "slurm"
        node = slurm.call("squeue", "-h", "--array", f"--jobs={handle.handle}", "-o", "%N").strip()
        assert node in NODES
        slurm.kill_node(node)
        wait(lambda: of(sweep, LOSES)[1].losses, 90, "a node that Slurm gives up")
        slurm.start_node(node)
        assert process.wait(240) == 0, (here / "bench.log").read_text()
    finally:
        process.kill()

    rows = sweep.read().rows
    found = {row.case.name[:3]: row.status for row in rows}
    want = {f"{n:03d}": "done" for n in range(1, 13)} | {FAILS: "failed", FULL: "out of memory", HANGS: "timed out"}
    assert {number: status.state for number, status in found.items()} == want, found
    assert (found[LOSES].attempt, found[LOSES].losses) == (2, 1)
    assert found[FAILS].error and found[FAILS].error["exit_code"] in (2, 65)
    assert found[HANGS].error and found[HANGS].error["code"] == "LIMIT"
    assert all(row.result and row.result.measured.step_s > 0 for row in rows if row.status.state == "done")
    arrays = {path.stem for path in (sweep.path / "slurm").glob("*.json")}
    assert 3 <= len(arrays) <= 4  # two shapes of limits, and what was lost; nobody was started twice
    assert json.loads((sweep.path / "sweep.json").read_text())["launcher"] == "slurm"


def test_without_control_groups_and_without_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Cluster
) -> None:
    """Slurm ends what takes too much by itself then, and says 0:9 of it, if it is asked in time: our file says why."""
    monkeypatch.chdir(tmp_path)
    with Cluster(tmp_path / "slurm", cgroups=False, accounting=False) as bare:
        monkeypatch.setenv("SLURM_CONF", bare.environment["SLURM_CONF"])
        (tmp_path / "sweep.toml").write_text(BARE)
        assert main(["bench", "sweep.toml", "--slurm", "--json"]) == 0
    rows = SweepFolder(tmp_path / "sweeps" / "sweep").read().rows
    assert [row.status.state for row in rows] == ["done", "out of memory"], [row.status for row in rows]

"""Runs that are preempted go on, bitwise: by `scontrol requeue`, by the signal of a time limit, by a job of a higher
partition."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from penteract.cli import main
from penteract.config.run import Slurm
from penteract.slurm.batch_file import Step, header, srun, surroundings, text
from penteract.slurm.job_shape import JobShape
from slurm.cluster import Cluster, wait

STEPS = 300
RUN = f"""
preset = "tiny"
[model]
layers = 2
[parallel]
dp = 2
zero = 1
[batch]
sequence_length = 64
global_batch_size = 4
[training]
steps = {STEPS}
validation_every = 0
[precision]
device = "cpu"
[slurm]
ranks_per_node = 1
exclusive = false
memory = "1500M"
time = "10:00"
grace = 60
"""


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, Path]:
    """(job, folder) of a run that is submitted."""
    assert main(["train", "run.toml", "--slurm", "--json", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["nodes"], said["ranks"]) == (2, 2) and Path(said["run"], "slurm", "job.sh").read_text() == said[
        "batch"
    ]
    return said["job"], Path(said["run"])


def rows(run: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    except FileNotFoundError:
        return []


def has_trained(run: Path, steps: int) -> None:
    wait(lambda: len(rows(run)) >= steps, 120, f"{steps} steps of {run.name}")


def is_done(slurm: Cluster, job: str, run: Path) -> None:
    def over() -> bool:
        status = json.loads((run / "status.json").read_text())
        return (
            status.get("exit_code") not in (None, 75) and not slurm.call("squeue", "-h", "-j", job, check=False).strip()
        )

    wait(over, 150, f"the end of {run.name}")
    log = "\n".join(at.read_text() for at in (run / "slurm").glob("*.log"))
    assert json.loads((run / "status.json").read_text())["exit_code"] == 0, log
    assert (run / "slurm" / "retries").read_text().startswith("0 "), log


def outcome(run: Path) -> tuple[list[float], dict[str, bytes]]:
    """The loss of each step, and the bytes of the last checkpoint's tensors."""
    losses = {int(row["step"]): row["train/loss"] for row in rows(run) if "train/loss" in row}
    assert sorted(losses) == list(range(1, STEPS + 1))
    last = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return [losses[step] for step in sorted(losses)], {at.name: at.read_bytes() for at in last.glob("*.safetensors")}


def restarts(slurm: Cluster, job: str) -> int:
    """Starts of a job that is over, by accounting."""
    return len(slurm.call("sacct", "-n", "-X", "-D", "-j", job, "-o", "JobID").split())


def test_a_preempted_run_goes_on_bitwise(slurm: Cluster, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.toml").write_text(RUN)
    alone, undisturbed = submit(capsys)
    has_trained(undisturbed, 1)
    queued, requeued = submit(capsys)
    (here / "run.toml").unlink()  # jobs have their own copy
    has_trained(requeued, 3)
    slurm.call("scontrol", "requeue", queued)
    wait(lambda: "stopped" in (requeued / "status.json").read_text(), 60, "the run that is queued again")
    has_trained(requeued, len(rows(requeued)) + 3)
    slurm.call(
        "scancel", "--signal=USR1", queued
    )  # what --signal=USR1@60 sends to the ranks, a minute before the limit
    is_done(slurm, alone, undisturbed)
    is_done(slurm, queued, requeued)

    (here / "run.toml").write_text(RUN)
    low, preempted = submit(capsys)
    has_trained(preempted, 3)
    high = slurm.call("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o/dev/null", "--wrap", "sleep 1")
    wait(lambda: "stopped" in (preempted / "status.json").read_text(), 60, "the run that is preempted")
    is_done(slurm, low, preempted)
    assert slurm.call("sacct", "-n", "-X", "-j", high.strip(), "-o", "State").strip() == "COMPLETED"

    want = outcome(undisturbed)
    assert len(want[1]) == 2 and outcome(requeued) == want and outcome(preempted) == want
    assert [restarts(slurm, job) for job in (alone, queued, low)] == [1, 3, 2]
    for run, times in ((requeued, 2), (preempted, 1)):  # it had saved in the time that Slurm gave it
        (log,) = (run / "slurm").glob("*.log")
        assert "which is saved" in log.read_text() and "resumed from step" in log.read_text()
        assert log.read_text().count("ended with 75, queued again: yes") == times


def test_a_run_that_fails_is_not_queued_again(slurm: Cluster, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.toml").write_text(RUN)
    job, run = submit(capsys, "--optimizer.learning_rate=1000", "--optimizer.clip_norm=0", "--model.initial_std=100")
    wait(lambda: not slurm.call("squeue", "-h", "-j", job, check=False).strip(), 120, "the end of a run that fails")
    time.sleep(1)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 73
    assert (restarts(slurm, job), slurm.call("sacct", "-n", "-X", "-j", job, "-o", "ExitCode").strip()) == (1, "73:0")
    assert "ended with 73, queued again: no" in (run / "slurm" / f"{job}.log").read_text()


@pytest.mark.parametrize("means", ["SLURM_DISTRIBUTION=cyclic", "SLURM_HOSTFILE=order"])
def test_neighbouring_ranks_share_a_node_whatever_the_users_distribution(
    slurm: Cluster, here: Path, means: str
) -> None:
    spec = Slurm(gpus="none", exclusive=False, memory="500M", ranks_per_node=2)
    shape = JobShape(nodes=2, ranks=4)
    step = Step(shape=shape, command=("sh", "-c", "echo at $RANK $SLURMD_NODENAME"), working=here)
    (here / "order").write_text("n1\nn2\nn1\nn2\n")
    lines = header(spec, shape, name="places", output=here / "log", working=here)
    lines += [f"export {means}", *surroundings(spec, step), srun(spec, step)]
    (here / "job.sh").write_text(text(lines))
    slurm.call("sbatch", "--wait", "--parsable", str(here / "job.sh"))
    found = sorted(line.split()[1:] for line in (here / "log").read_text().splitlines() if line.startswith("at "))
    assert found == [["0", "n1"], ["1", "n1"], ["2", "n2"], ["3", "n2"]], (here / "log").read_text()

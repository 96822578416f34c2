"""The launcher of sweeps: arrays of jobs, and what they leave and Slurm says of them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from measure.slurm.batches import PLAIN, lines
from measure.slurm.slurm_replies import SACCT, SQUEUE
from penteract.errors import BadInput
from penteract.measure.bench.launcher import CaseJob, JobState
from penteract.measure.bench.slurm_launcher import SlurmLauncher
from penteract.slurm.array_job import EXIT, LOG


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    """Its commands are ours: `sbatch` counts, `squeue` and `sacct` print what a file says."""
    for name, text in (
        ("sbatch", f"n=$(ls {tmp_path}/batches | wc -l); cat > {tmp_path}/batches/$n; echo $((12 + n))"),
        ("squeue", f"echo >> {tmp_path}/questions; cat {tmp_path}/squeue"),
        ("sacct", f"[ -e {tmp_path}/sacct ] || exit 1; cat {tmp_path}/sacct"),
        ("scancel", f'echo "$@" > {tmp_path}/cancelled'),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "batches").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return SlurmLauncher(slurm_of=lambda job: replace(PLAIN, gpus="none"), folder=tmp_path / "sweep", working=tmp_path,
                         here="/venv/bin/python", ask_s=0)  # fmt: skip


def jobs(folder: Path, *ranks: int) -> list[CaseJob]:
    made = [CaseJob(name=f"{i:03d}", folder=folder / f"{i:03d}" / "attempt-1", ranks=r, limit_s=90,
                    command=("/venv/bin/python", "-c", f"case {i}")) for i, r in enumerate(ranks)]  # fmt: skip
    for job in made:
        job.folder.mkdir(parents=True)
    return made


def test_cases_of_a_shape_are_an_array(launcher: SlurmLauncher, tmp_path: Path) -> None:
    assert launcher.start(jobs(tmp_path, 1, 8, 1, 8, 1)) == ["12_0", "13_0", "12_1", "13_1", "12_2"]
    one, two = ((tmp_path / "batches" / n).read_text() for n in ("0", "1"))
    assert "--no-requeue --array=0-2" in lines(one) and "--no-requeue --array=0-1" in lines(two)
    assert "--nodes=2" in lines(two) and "--time=00:02:30" in lines(two)
    assert f"--output={tmp_path}/sweep/slurm/%A_%a.log" in lines(two)
    assert two.count("\nsrun ") == 2 and "'case 3'" in two and "export WORLD_SIZE=8 LOCAL_WORLD_SIZE=4" in two
    assert subprocess.run(["bash", "-n"], input=two, text=True, check=True).returncode == 0
    launcher.stop(["12_0", "13_1"])
    assert (tmp_path / "cancelled").read_text() == "--quiet 12_0 13_1\n"


def test_of_several_arrays_all_are_submitted_or_none_runs(launcher: SlurmLauncher, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    refuses = f"[ $(ls {tmp_path}/batches | wc -l) -lt 1 ] || {{ echo 'Requested node configuration' >&2; exit 1; }}"
    sbatch.write_text(sbatch.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{refuses}\n"))
    with pytest.raises(BadInput, match="Requested node configuration"):
        launcher.start(jobs(tmp_path, 1, 8))
    assert (tmp_path / "cancelled").read_text() == "--quiet 12\n"


def test_what_jobs_leave_and_what_slurm_says(launcher: SlurmLauncher, tmp_path: Path) -> None:
    handles = launcher.start(made := jobs(tmp_path, *[1] * 8))
    (tmp_path / "squeue").write_text(SQUEUE)
    (tmp_path / "sacct").write_text(SACCT)
    (made[6].folder / EXIT).write_text("71 33\n")
    (made[7].folder / LOG).write_text("slurmstepd: error: Step 9.0 exceeded memory limit (4 > 1), being killed\n")
    want = [
        JobState(state="running", seconds=65, about="RUNNING on n[1-2]"),
        JobState(state="waiting", seconds=0, about="PENDING: Resources"),
        JobState(state="ended", cause="lost", seconds=9, about="NODE_FAIL on n2"),
        JobState(state="ended", exit_code=1, cause="memory", seconds=40, about="OUT_OF_MEMORY on n1"),
        JobState(state="ended", exit_code=137, cause="lost", seconds=3, about="CANCELLED on n2"),
        JobState(state="ended", exit_code=0, seconds=60, about="COMPLETED on n[1-2]"),
        JobState(state="ended", exit_code=71, seconds=33),
        JobState(state="unknown", cause="memory"),
    ]
    assert launcher.states(handles) == want
    (tmp_path / "sacct").unlink()  # no accounting: what squeue still has, and what jobs left
    assert launcher.states(handles) == [*want[:3], *[JobState(state="unknown")] * 3, *want[6:]]
    fresh = replace(launcher)  # another process
    assert fresh.states(handles[6:]) == want[6:]


def test_slurm_is_asked_where_jobs_are_silent_and_not_often(launcher: SlurmLauncher, tmp_path: Path) -> None:
    handles = launcher.start(made := jobs(tmp_path, 1, 1))
    questions = tmp_path / "questions"
    (tmp_path / "squeue").write_text(SQUEUE)
    launcher.ask_s = 60
    assert all(launcher.states(handles)[0] is not None for _ in range(3)) and len(questions.read_text()) == 1
    for job in made:
        (job.folder / EXIT).write_text("0 5\n")
    launcher.ask_s = 0
    assert launcher.states(handles) == [JobState(state="ended", exit_code=0, seconds=5)] * 2
    assert len(questions.read_text()) == 1
    (made[0].folder / EXIT).unlink()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")  # the controller is away: no news
    assert launcher.states(handles) == [None, JobState(state="ended", exit_code=0, seconds=5)]

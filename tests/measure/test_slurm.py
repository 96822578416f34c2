"""Jobs of Slurm without a Slurm: batch files as bash reads them, costs, and what its answers mean."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.cli import main
from penteract.cli.benching.slurm_jobs import cases_of_jobs
from penteract.cli.resolve import gpu_defaults
from penteract.config.resolve.resolved_run import resolve
from penteract.config.run import Slurm
from penteract.errors import BadInput
from penteract.measure.bench import slurm_launcher
from penteract.measure.bench.cases.sweep_file import read_sweep
from penteract.measure.bench.launcher import CaseJob, JobState
from penteract.measure.bench.slurm_launcher import SlurmLauncher
from penteract.slurm.answers import Answer, parse_sacct, parse_squeue
from penteract.slurm.array_job import EXIT, LOG
from penteract.slurm.job_shape import JobShape, cost_line, job_shape, seconds_of
from penteract.slurm.run_job import run_job

PLAIN = Slurm(ranks_per_node=4)
FULL = Slurm(
    ranks_per_node=8, partition="gpu", account="llm@lab", qos="high", time="2-12:00:00", gpus="gres", gpu_type="h100",
    cpus_per_rank=12, memory="0", container="/images/torch 2.sqsh", container_mounts=("/data:/data",), grace=300,
    setup=("module load cuda",), options=("--constraint=ib", "--comment=two words"), usd_per_gpu_hour=2.5,
)  # fmt: skip
NASTY = "a'b\"c $(touch gone) `touch gone` ; touch gone # \\ ü"


def lines(batch: str, start: str = "#SBATCH") -> list[str]:
    return [line.removeprefix(f"{start} ") for line in batch.splitlines() if line.startswith(start)]


def of_run(slurm: Slurm, ranks: int, words: tuple[str, ...] = ("run.toml",), run: Path = Path("/runs/a")) -> str:
    return run_job(slurm, job_shape(ranks, slurm), words, run, Path("/work"), "/venv/bin/python")


# ---- shapes, times and costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "slurm", "shape"),
    [(1, PLAIN, (1, 1)), (4, PLAIN, (1, 4)), (8, PLAIN, (2, 4)), (6, replace(PLAIN, nodes=3), (3, 2)),
     (64, replace(PLAIN, ranks_per_node=8), (8, 8))],
)  # fmt: skip
def test_nodes_follow_from_ranks(ranks: int, slurm: Slurm, shape: tuple[int, int]) -> None:
    found = job_shape(ranks, slurm)
    assert (found.nodes, found.on_a_node) == shape


@pytest.mark.parametrize(("ranks", "slurm"), [(7, PLAIN), (9, replace(PLAIN, nodes=2)), (8, replace(PLAIN, nodes=1))])
def test_nodes_that_ranks_do_not_fill_are_refused(ranks: int, slurm: Slurm) -> None:
    with pytest.raises(BadInput, match=r"slurm\.ranks_per_node · found 4"):
        job_shape(ranks, slurm)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("auto", None), ("90", 5400), ("90:30", 5430), ("01:00:05", 3605), ("2-3", 183_600), ("2-3:04", 183_840),
     ("2-03:04:05", 183_845), ("0:15", 15), ("10080", 604_800)],
)  # fmt: skip
def test_times_are_read_as_slurm_does(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@given(st.text(max_size=12))
def test_a_time_is_seconds_or_refused(text: str) -> None:
    try:
        assert (seconds_of(text) or 0) >= 0
    except BadInput:
        assert not text.isdigit() or not text.isascii() or len(text) > 6


def test_what_a_job_costs() -> None:
    shape = JobShape(4, 32)
    assert cost_line(shape, FULL, 86_400.0) == (
        "32 GPUs on 4 nodes for at most 24 h 00 min: 768 GPU-hours, 1 920.00 USD at 2.5 USD a GPU-hour"
    )
    assert cost_line(JobShape(1, 1), PLAIN, 1800.0, 12) == (
        "12 jobs of at most 1 GPU on 1 node for at most 30 min 00 s: 6 GPU-hours"
    )
    assert cost_line(shape, replace(FULL, gpus="none"), None) == (
        "32 ranks on 4 nodes without a limit of time: 32 rank-hours an hour, 80.00 USD at 2.5 USD a rank-hour"
    )


# ---- the batch file of a run -----------------------------------------------------------------------------------------


def test_a_plain_batch_file() -> None:
    assert lines(of_run(PLAIN, 8)) == [
        "--job-name=a", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gpus-per-node=4",
        "--output=/runs/a/slurm/%j.log", "--open-mode=append", "--chdir=/work", "--exclusive",
        "--requeue --signal=USR1@120",
    ]  # fmt: skip


def test_a_batch_file_with_everything() -> None:
    batch = of_run(FULL, 32)
    assert {"--partition=gpu", "--account=llm@lab", "--qos=high", "--time=2-12:00:00", "--gres=gpu:h100:8", "--mem=0",
            "--cpus-per-task=12", "--constraint=ib", "--comment=two words",
            "--requeue --signal=USR1@300"} <= {*lines(batch)}  # fmt: skip
    (srun,) = lines(batch, "srun")
    assert "'--container-image=/images/torch 2.sqsh' --container-mounts=/work:/work,/runs/a:/runs/a,/data:/data" in srun
    assert "--container-workdir=/work" in srun and " rank python3 -m penteract train " in srun
    assert "--cpus-per-task=12 --cpu-bind=none" in srun
    assert batch.index("\nmodule load cuda\n") < batch.index("\nsrun ")
    apptainer = of_run(replace(FULL, container_runtime="apptainer"), 32)
    assert "rank apptainer exec --nv --bind /work:/work,/runs/a:/runs/a,/data:/data --pwd /work" in apptainer


def test_a_name_with_a_blank_is_one_name() -> None:
    assert "--job-name='my run'" in lines(of_run(PLAIN, 4, run=Path("/runs/my run")))


def test_the_key_of_a_run_is_made_in_the_job() -> None:
    """Neither the file nor an argument has it: whoever may look at jobs may look at these."""
    batch = of_run(PLAIN, 4)
    (line,) = (line for line in batch.splitlines() if "PENTERACT_RUN_KEY" in line)
    keys = {subprocess.check_output(["bash", "-c", f'{line}; printf %s "$PENTERACT_RUN_KEY"'], text=True)
            for _ in range(2)}  # fmt: skip
    assert len(keys) == 2 and all(len(key) == 64 and int(key, 16) for key in keys)
    assert "RUN_KEY" not in lines(batch, "srun")[0]


@pytest.mark.parametrize(
    "words",
    ["slurm.partition=a b", "slurm.account=$(id)", "slurm.qos=a;b", "slurm.gpu_type=`id`", "slurm.memory=1 G",
     "slurm.time=tomorrow", "slurm.options=constraint=ib", "slurm.options=;id"],
)  # fmt: skip
def test_values_that_cannot_stand_in_a_batch_file_are_refused(words: str) -> None:
    with pytest.raises(BadInput, match=words.partition("=")[0]):
        of_run(resolve(overrides=[words]).run.slurm, 8)


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


def test_submitting_and_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("[slurm]\nranks_per_node = 2\npartition = 'low'\n")
    words = ["train", "my.toml", "--slurm", "--slurm.nodes", "2", "--slurm.time", "10", "--steps", "3"]
    assert main([*words, "--dry-run", "--usd-per-gpu-hour", "3"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --partition=low" in said and "4 GPUs on 2 nodes" in said and "2.00 USD" in said
    assert "training.steps=3" in said and [at.name for at in tmp_path.iterdir()] == ["my.toml"]

    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2 and "there is no sbatch here" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))

    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/batch; echo '41;cluster'\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["nodes"], told["ranks"]) == ("41", 2, 4)
    run = Path(told["run"])
    assert (tmp_path / "batch").read_text() == told["batch"] == (run / "slurm" / "job.sh").read_text()
    assert (run / "slurm" / "submitted.toml").read_text() == (tmp_path / "my.toml").read_text()
    assert json.loads((run / "status.json").read_text())["state"] == "queued"
    assert main([*words, "--into", str(tmp_path)]) == 2 and "no run's" in capsys.readouterr().err


# ---- what Slurm says -------------------------------------------------------------------------------------------------

SQUEUE = """\
12_0|RUNNING|1:05|n[1-2]|None
12_1|PENDING|0:00||Resources
13|COMPLETING|1-02:00:00|n1|None
12_2|NODE_FAIL|0:09|n2|None
14|RUNNING|INVALID|n1|None
nonsense
"""
SACCT = """\
12_3|FAILED|1:0|40|n1
12_3.batch|FAILED|1:0|40|n1
12_3.0|OUT_OF_MEMORY|0:125|39|n1
12_4|CANCELLED by 1000|0:9|3|n2
12_5|COMPLETED|0:0|60|n[1-2]
12_6|PENDING|0:0|0|None assigned
"""


def test_squeue_is_read() -> None:
    assert parse_squeue(SQUEUE) == {
        "12_0": Answer(state="RUNNING", seconds=65, about="RUNNING on n[1-2]"),
        "12_1": Answer(state="PENDING", seconds=0, about="PENDING: Resources"),
        "13": Answer(state="COMPLETING", seconds=93_600, about="COMPLETING on n1"),
        "12_2": Answer(state="NODE_FAIL", seconds=9, about="NODE_FAIL on n2"),
        "14": Answer(state="RUNNING", about="RUNNING on n1"),
    }


def test_sacct_is_read() -> None:
    assert parse_sacct(SACCT) == {
        "12_3": Answer(state="OUT_OF_MEMORY", exit_code=1, seconds=40, about="OUT_OF_MEMORY on n1"),
        "12_4": Answer(state="CANCELLED", exit_code=137, seconds=3, about="CANCELLED on n2"),
        "12_5": Answer(state="COMPLETED", exit_code=0, seconds=60, about="COMPLETED on n[1-2]"),
        "12_6": Answer(state="PENDING", exit_code=0, seconds=0, about="PENDING"),
    }


@given(st.text(alphabet="12_|:-.\n RUNNINGPED", max_size=80))
def test_no_answer_is_too_odd(text: str) -> None:
    parse_squeue(text)
    parse_sacct(text)


# ---- the launcher of sweeps ------------------------------------------------------------------------------------------


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


SWEEP = 'preset = "tiny"\n{gpus}[grid]\n"batch.micro_batch_size" = [1, 2]\n[set]\n"slurm.partition" = "gpu"\n{more}'


def test_a_sweep_of_jobs_says_what_it_leaves_to_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train` chooses precision and kernels for the GPU that it sees; cases of jobs are written where none is."""
    monkeypatch.chdir(tmp_path)
    words = ["bench", "sweep.toml", "--slurm", "--dry-run"]
    for gpus, device, more, left in (
        ("", "cpu", "", ""),
        ("", "cuda", "", "precision.dtype, kernels.attention, kernels.elementwise"),
        ("", "cuda", '"precision.dtype" = "bf16"\n', "kernels.attention, kernels.elementwise"),
        ('gpus = "1xH100"\n', "cuda", "", ""),
    ):
        Path("sweep.toml").write_text(SWEEP.format(gpus=gpus, more=f'"precision.device" = "{device}"\n{more}'))
        assert main(words) == 0
        note = f"note: no GPU is asked from here, and the sweep names none: {left} keep their defaults · fix: --gpus, "
        assert capsys.readouterr().err == (f"{note}such as 8xH100\n" if left else "")


@pytest.mark.parametrize(
    ("gpus", "more", "chosen"),
    [
        ("1xH100", "", {"device": "cuda", "dtype": "bf16", "attention": "cudnn", "elementwise": "reference"}),
        ("1xH100", '"slurm.container" = "a.sqsh"', {"device": "cuda", "dtype": "bf16", "elementwise": "triton"}),
        ("1xH100", '"precision.dtype" = "fp32"', {"device": "cuda", "dtype": "fp32", "attention": "reference"}),
        ("1xH100", '"precision.device" = "cpu"', {"device": "cpu", "dtype": "fp32", "attention": "reference"}),
        ("1xMI300X", "", {"device": "auto", "dtype": "fp32", "attention": "reference"}),
    ],
    ids=["GPU", "container", "precision", "CPU", "no CUDA"],
)
def test_cases_of_jobs_are_what_their_nodes_would_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, more: str, chosen: dict[str, str]
) -> None:
    """By the GPU that the sweep names, whatever is here; and a job asks for GPUs where its case needs them."""
    monkeypatch.setattr(gpu_defaults, "find_spec", lambda name: None)  # no torch, no triton: a login node
    text = SWEEP.format(gpus=f'gpus = "{gpus}"\n', more=f'"data.pack_documents" = false\n{more}\n')
    (tmp_path / "sweep.toml").write_text(text)
    cases = cases_of_jobs(read_sweep(tmp_path / "sweep.toml"), [])
    assert [one.run.run.layout.micro_batch_size for one in cases.cases] == [1, 2]  # the sweep decides
    for run in (one.run.run for one in cases.cases):
        found = {"device": run.precision.device, "dtype": run.precision.dtype, "attention": run.layout.attention,
                 "elementwise": run.layout.elementwise}  # fmt: skip
        assert found == found | chosen
        assert (slurm_launcher.of_run(run).gpus == "none") == (run.precision.device == "cpu")

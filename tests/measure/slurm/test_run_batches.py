"""The batch file of a run: its options, its command, and what cannot stand in it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from measure.slurm.batches import FULL, PLAIN, lines, of_run
from penteract.config.resolve.resolved_run import resolve
from penteract.errors import BadInput


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
    assert "--cpus-per-task=12 --distribution=block --cpu-bind=none" in srun
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

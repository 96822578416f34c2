"""Settings of Slurm, and the batch file of a run with them."""

from __future__ import annotations

from pathlib import Path

from penteract.config.run import Slurm
from penteract.slurm.job_shape import job_shape
from penteract.slurm.run_job import run_job

PLAIN = Slurm(ranks_per_node=4)
FULL = Slurm(
    ranks_per_node=8, partition="gpu", account="llm@lab", qos="high", time="2-12:00:00", gpus="gres", gpu_type="h100",
    cpus_per_rank=12, memory="0", container="/images/torch 2.sqsh", container_mounts=("/data:/data",), grace=300,
    setup=("module load cuda",), options=("--constraint=ib", "--comment=two words"), usd_per_gpu_hour=2.5,
)  # fmt: skip


def lines(batch: str, start: str = "#SBATCH") -> list[str]:
    return [line.removeprefix(f"{start} ") for line in batch.splitlines() if line.startswith(start)]


def of_run(slurm: Slurm, ranks: int, words: tuple[str, ...] = ("run.toml",), run: Path = Path("/runs/a")) -> str:
    return run_job(slurm, job_shape(ranks, slurm), words, run, Path("/work"), "/venv/bin/python")

"""Cases of a sweep of jobs are what their nodes would choose, and what is left to the defaults is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from penteract.cli import main
from penteract.cli.benching import slurm_jobs
from penteract.cli.benching.slurm_jobs import cases_of_jobs
from penteract.cli.resolve import gpu_defaults
from penteract.config.hardware import Gpu
from penteract.measure.bench import slurm_launcher
from penteract.measure.bench.cases.sweep_file import read_sweep

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


@pytest.mark.parametrize(("words", "together"), [([], 8), (["--slurm.nodes=1"], 8), (["--slurm.nodes=2"], 1)], ids=str)
def test_a_job_knows_how_many_of_its_ranks_share_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], together: int
) -> None:
    asked = list[int]()

    def card_of(node: Gpu, *, container: bool, host_ranks: int) -> None:
        asked.append(host_ranks)

    monkeypatch.setattr(slurm_jobs, "card_of", card_of)
    (tmp_path / "sweep.toml").write_text(SWEEP.format(gpus='gpus = "2xH200"\n', more=""))
    cases_of_jobs(read_sweep(tmp_path / "sweep.toml"), words)
    assert set(asked) == {together}


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

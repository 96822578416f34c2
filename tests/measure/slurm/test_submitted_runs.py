"""`penteract train --slurm` prints a job, or submits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penteract.cli import main


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

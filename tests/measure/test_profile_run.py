"""`penteract profile` from end to end, of one rank on a CPU."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

import forks
from penteract.cli.app import main
from penteract.cli.resolve.needed_gpus import check_rates
from penteract.config.resolve.resolved_run import resolve
from penteract.errors import BadInput
from penteract.measure.schemas.profile_reader import read_profile

WORDS = ("--preset", "tiny", "model.layers=1", "batch.sequence_length=64", "batch.micro_batch_size=1",
         "batch.global_batch_size=1", "precision.device=cpu", "--out", "here")  # fmt: skip


def test_a_run_is_profiled_and_its_files_agree(tmp_path: Path):
    done = forks.penteract(["profile", *WORDS], os.environ, folder=tmp_path)
    assert done.returncode == 0 and [line.split()[:2] for line in done.stderr.splitlines()] == [
        ["profile:", "13"], ["profile:", "3"], ["profile:", "the"], ["profile:", "what"]
    ]  # fmt: skip
    found = read_profile(tmp_path / "here")
    changes = [row["picoseconds"] for row in found["waterfall"] if not row["level"]]
    assert found["step"]["ideal"] + sum(changes) == found["step"]["measured"]
    assert found["basis"]["kind"] == "short"
    assert len(found["step"]["bare"]) == 10
    assert len(found["step"]["profiled"]) == 3
    assert {"parameters", "gradients", "optimizer"} <= found["memory"][0]["owners"].keys()
    assert sum(found["memory"][0]["owners"].values()) == found["memory"][0]["peak"]
    trace = json.loads(gzip.decompress((tmp_path / "here" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {row["args"]["name"] for row in trace if row["name"] == "process_name"} == {
        "prediction", "measurement, 3 steps under the profiler",
    }  # fmt: skip
    page = (tmp_path / "here" / "profile.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page


def test_rates_of_gpus_are_refused_for_a_run_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *WORDS, "--gpus", "8xH200"]) == 2
    assert "these are rates of GPUs, and this run is on CPUs · --gpus · found 8xH200" in capsys.readouterr().err


def test_rates_of_this_machine_are_not() -> None:
    run = resolve(None, "tiny", ["precision.device=cpu"]).run
    for name in ("here", "8xhere", "HERE.TOML"):
        check_rates(run, None, name)
    with pytest.raises(BadInput, match="rates of GPUs"):
        check_rates(run, None, "8xH200")

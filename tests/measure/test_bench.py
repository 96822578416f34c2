"""`penteract bench` with processes: what works, what breaks in every way, and what is killed and goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from penteract.cli.app import main
from penteract.measure.schemas.sweep_folder import SweepFolder

SWEEP = """
preset = "tiny"
steps = 10
warmup = 2

[set]
model.layers = 1
batch.sequence_length = 16
batch.global_batch_size = 2
batch.micro_batch_size = 1
precision.device = "cpu"

[grid]
parallel.tp = [1, 2]

[[case]]  # there is no such device
precision.device = "cuda"

[[case]]  # more than a process may map
model.ffn_size = 600_000

[[case]]  # nothing starts in that time
limit = 0.3

[[case]]  # more than any machine has
model.hidden_size = 1_048_576
model.ffn_size = 4_194_304
"""
MAPPED = 3 * 2**30  # bytes of addresses that a process may have


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAPPED, MAPPED))


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penteract", "bench", *words], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=bounded, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def running(folder: Path) -> list[str]:
    """Processes that have the sweep's folder on their command line."""
    found = list[str]()
    for at in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = at.read_bytes().decode().split("\0")
        except OSError:
            continue
        found += [" ".join(words)] * any(str(folder / "sweeps") in word for word in words)
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was killed while its second case ran, and went on to its end."""
    at = tmp_path_factory.mktemp("bench")
    (at / "all.toml").write_text(SWEEP)
    folder = SweepFolder(at / "sweeps" / "all")
    process = start(at, "all.toml")
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if folder.exists and folder.read().rows[1].status.state == "running":
            break
        time.sleep(0.1)
    assert process.poll() is None, process.communicate()[1]
    assert folder.read().rows[0].status.state == "done"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while running(at) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(at)
    first = (folder.case("001_tp1").path / "status.json").read_bytes()
    process = start(at, "all.toml")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert (folder.case("001_tp1").path / "status.json").read_bytes() == first
    assert "6 cases: 2 done, 1 failed, 1 out of memory, 1 timed out, 1 skipped" in out
    assert "001_tp1" in out and not running(at)
    return folder.path


def test_each_case_ends_in_its_own_way(swept: Path) -> None:
    rows = SweepFolder(swept).read().rows
    assert [row.status.state for row in rows] == ["done", "done", "failed", "out of memory", "timed out", "skipped"]
    errors = [row.status.error or {} for row in rows]
    assert (errors[2]["code"], errors[2]["exit_code"]) == ("DEVICE", 2)
    assert (errors[3]["code"], errors[3]["exit_code"]) == ("MEMORY", 71)
    assert errors[4]["what"] == "not done in 0.3 s"
    assert errors[5]["what"] == "predicted not to fit" and "GiB" in errors[5]["found"]
    assert rows[1].status.attempt == 3 and rows[1].status.losses == 0  # killed with the sweep: not its fault


def test_what_was_measured(swept: Path) -> None:
    one, two = (row for row in SweepFolder(swept).read().rows if row.result)
    assert one.result is not None and two.result is not None
    measured, source = one.result.measured, one.result.provenance
    assert (len(measured.steps_s), len(measured.warmup_s), len(measured.losses)) == (10, 2, 12)
    assert measured.tokens_per_s_per_gpu == pytest.approx(32 / measured.step_s)
    assert measured.loss_falls and not measured.void and measured.mfu is None and measured.data == "random"
    assert measured.losses == pytest.approx(two.result.measured.losses, rel=1e-5)  # the same samples on any layout
    assert len(two.result.measured.allocated_bytes) == 2 and not measured.device_bytes
    for row in (one, two):
        assert row.result is not None
        fullest = max(row.result.measured.allocated_bytes)
        assert row.case.predicted.allocated_bytes == pytest.approx(fullest, rel=5e-3)
    assert source.versions["torch"] and source.device and source.began < source.ended
    assert source.command.endswith("bench all.toml") and two.status.gpu_seconds > 2 * sum(two.result.measured.steps_s)


def test_what_it_shows(swept: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv, plot = tmp_path / "a.csv", tmp_path / "a.svg"
    assert main(["bench", "show", str(swept), "--csv", str(csv), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "dp=1,tp=2,mbs=1" in out and "error[" not in out and "not done in 0.3 s" in out
    assert len(csv.read_text().splitlines()) == 7
    ET.fromstring(plot.read_text())
    assert main(["bench", "show", str(swept), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ended"] and len(shown["ranking"]) == 2 and shown["plan"]["regret"] is None
    assert main(["bench", "status", str(swept)]) == 0
    assert "timed out" in capsys.readouterr().out
    assert main(["bench", "status", str(swept), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] is False
    shutil.copytree(swept, tmp_path / "again")
    assert main(["bench", "compare", str(swept), str(tmp_path / "again")]) == 0
    assert "noise" in capsys.readouterr().out


def test_it_is_over_and_cannot_become_another(
    swept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(swept.parent.parent)
    assert main(["bench", "sweeps/all"]) == 0
    capsys.readouterr()
    assert main(["bench", "all.toml", "--steps", "11"]) == 2
    assert "the folder holds another sweep" in capsys.readouterr().err
    assert main(["bench", "sweeps/all", "--steps", "11"]) == 2
    assert "goes on as it is" in capsys.readouterr().err
    assert main(["bench", "all.toml", "--slurm"]) == 2
    assert "goes on where it began" in capsys.readouterr().err
    assert main(["bench", "sweeps/all", "--budget", "nan"]) == 2
    assert "--budget" in capsys.readouterr().err
    before = (swept / "sweep.json").read_bytes()
    capsys.readouterr()
    for words, out, err in (
        (["all.toml"], "6 cases: 2 done, 1 failed, 1 out of memory, 1 timed out, 1 skipped", ""),
        (["all.toml"], "\n0 cases to run\n", ""),
        (["all.toml", "--limit", "500"], "\n0 cases to run\n", ""),  # the case that timed out has a limit of its own
        (["sweeps/all"], "\n0 cases to run\n", ""),
        (["all.toml", "--steps", "11"], "5 cases to run, 2 + 11 steps each", "note: sweeps/all holds another sweep"),
        (["all.toml", "--slurm"], "#SBATCH", "note: no GPU is asked from here"),
    ):
        assert main(["bench", *words, "--budget", "1", "--dry-run"]) == 0
        said = capsys.readouterr()
        assert out in said.out and said.err.startswith(err) and bool(said.err) == bool(err)
        assert (swept / "sweep.json").read_bytes() == before  # nothing but printing

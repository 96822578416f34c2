"""`penteract doctor` as it is typed."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penteract.engine.doctor.machine import Disk, Gpus, Host, HostReport, ProcessLimits, Torch, Use
from penteract.engine.doctor.probe import here

Tell = Callable[..., Any]

SOUND = HostReport(
    host=Host(system="Linux", python="3.11", cores=4, allowed=4, memory=2**34, available=2**34, shm=2**34),
    gpus=Gpus(),
    torch=Torch(version="2.13.0", gloo=True, device="cpu"),
    disk=Disk(folder="runs", asked="/runs", free=2**40, total=2**40, speed=1e9),
    limits=ProcessLimits(),
    use=Use(ranks=1, threads=4),
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostReport], list[tuple[Any, ...]]]:
    """Puts a described machine in the place of this one; gives what was asked of it."""

    def put(machine: HostReport) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(here, "this_machine", lambda *words: asked.append(words) or machine)
        return asked

    return put


def test_a_run_can_start(tell: Tell, seen: Callable[[HostReport], list[Any]]) -> None:
    asked = seen(SOUND)
    said = tell("doctor")
    assert (said.code, said.err) == (0, "")
    assert "host\n ok   Linux, Python 3.11\n" in said.out
    assert said.out.endswith("1 note, no errors: a run can start.\n")
    assert (asked[0][0], asked[0][2]) == (Path("runs"), 1)
    assert tell("doctor", "/scratch/runs").code == 0
    assert asked[1][0] == Path("/scratch/runs")


def test_help_says_what_its_exit_code_means(tell: Tell) -> None:
    said = tell("doctor", "--help")
    assert said.code == 0 and "penteract doctor --json" in said.out.split("Examples:")[1]
    assert "2 when something is bad" in " ".join(said.out.split())


def test_without_torch_it_says_what_to_install(tell: Tell, seen: Callable[[HostReport], list[Any]]) -> None:
    seen(replace(SOUND, torch=None))
    said = tell("doctor")
    assert said.code == 2
    assert " bad  training needs torch" in said.out and "      fix: pip install 'penteract[train]'\n" in said.out
    assert said.out.endswith("1 error, 1 note: no run can start.\n")


def test_json(tell: Tell, seen: Callable[[HostReport], list[Any]]) -> None:
    seen(replace(SOUND, disk=replace(SOUND.disk, error="Read-only file system", speed=None)))
    said = tell("doctor", "--json")
    given = json.loads(said.out)
    assert (said.code, given["schema"], given["can_train"]) == (2, "penteract.doctor/1", False)
    assert [row["area"] for row in given["findings"] if row["state"] == "bad"] == ["disk"]
    assert given["machine"]["host"]["cores"] == 4


def test_ranks_of_a_launcher(
    tell: Tell, seen: Callable[[HostReport], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = seen(SOUND)
    place = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in (place | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert tell("doctor").code == 0
    assert asked[0][2] == 8
    monkeypatch.setenv("RANK", "16")
    said = tell("doctor")
    assert said.code == 2 and "the launcher's ranks do not fit: RANK=16 WORLD_SIZE=16" in said.out


def test_torch_is_asked_elsewhere(tmp_path: Path) -> None:
    """This machine, told by the program itself; its own process stays without torch."""
    code = (
        "import sys; from penteract.cli import main; code = main(['doctor', '--json']); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    given = json.loads(done.stdout)
    assert (done.returncode, done.stderr.strip()) == (0, "False")
    assert given["can_train"] and given["machine"]["torch"]["version"] == torch.__version__
    assert list(tmp_path.iterdir()) == []

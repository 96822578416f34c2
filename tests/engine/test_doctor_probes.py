"""Asking a machine: the one that is here, and what tools print on others."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penteract.config import cgroup
from penteract.engine.device.device import Cuda
from penteract.engine.doctor.machine import GpuState, Port, Torch, TorchDevice, Use
from penteract.engine.doctor.probe import child, gpus, network, smi
from penteract.engine.doctor.probe.disk import disk as probe_disk
from penteract.engine.doctor.probe.here import this_machine
from penteract.engine.doctor.report import can_train, examine
from penteract.engine.doctor.use import BACKENDS
from penteract.engine.rank import rank
from penteract.units import GIB, MIB

pytestmark = pytest.mark.alone


def test_this_machine(tmp_path: Path) -> None:
    """Against what other sources say of it."""
    it = this_machine(tmp_path / "none" / "runs", {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "NCCL_VERSION": "2"}, 2)
    assert it.host.cores == os.cpu_count()
    assert it.host.allowed == len(os.sched_getaffinity(0))
    assert platform.python_version() in it.host.python
    assert it.host.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert it.torch is not None
    assert (it.torch.version, it.torch.error) == (torch.__version__, "")
    assert it.torch.available == torch.cuda.is_available()
    assert len(it.torch.devices) == torch.cuda.device_count()
    assert it.use == Use(ranks=2, threads=max(1, it.host.usable // 2))
    assert it.disk.asked == str(tmp_path) and list(tmp_path.iterdir()) == []
    assert it.disk.total == shutil.disk_usage(tmp_path).total
    assert (it.disk.speed or 0) > 1e6
    assert it.environment == {"NCCL_DEBUG": "INFO"}
    assert can_train(examine(it))


def test_the_backend_is_what_the_engine_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rank.dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(rank.dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(rank, "open_store", lambda *_: rank.dist.HashStore())
    monkeypatch.setattr(rank, "RollCall", lambda *_, **__: SimpleNamespace(hold=lambda: None))
    monkeypatch.setattr(Cuda, "name", "a GPU")  # there is none to ask
    for kind in BACKENDS:
        monkeypatch.setattr(rank, "pick_device", lambda wanted, local, kind=kind: torch.device(kind))
        rank.join({"WORLD_SIZE": "2", "RANK": "0", "OMP_NUM_THREADS": "1"}, "auto")
    assert asked == list(BACKENDS.values())


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert probe_disk(tmp_path).error == "No space left on device"


def test_control_groups(tmp_path: Path) -> None:
    """The least of a group and its ancestors, in both versions."""
    job = tmp_path / "v2" / "pod" / "job"
    job.mkdir(parents=True)
    (tmp_path / "v2" / "pod" / "cpu.max").write_text("350000 100000\n")
    (job / "cpu.max").write_text("500000 100000\n")
    (job / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "v2" / "pod" / "memory.max").write_text("max\n")
    two = tmp_path / "two"
    two.write_text("0::/pod/job\n")
    assert cgroup.cores(tmp_path / "v2", two) == 3.5
    assert cgroup.memory(tmp_path / "v2", two) == 2 * GIB
    assert cgroup.memory_left(tmp_path / "v2", two) == 2 * GIB  # nothing says what is used
    (job / "memory.current").write_text(f"{GIB}\n")
    (job / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    assert cgroup.memory_left(tmp_path / "v2", two) == 2 * GIB - GIB + GIB // 4
    assert cgroup.tasks(tmp_path / "v2", two) is None
    cpu = tmp_path / "v1" / "cpu" / "job"
    cpu.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("150000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    memory = tmp_path / "v1" / "memory" / "job"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    one = tmp_path / "one"
    one.write_text("4:memory:/job\n3:cpuacct,cpu:/job\n")
    # Version 1 mounts cpu and cpuacct as one; a link carries either name.
    assert cgroup.cores(tmp_path / "v1", one) == 1.5
    assert cgroup.memory(tmp_path / "v1", one) is None
    assert cgroup.memory_left(tmp_path / "v1", one) is None
    assert cgroup.cores(tmp_path / "v1", tmp_path / "absent") is None


def test_adapters(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n"), ("link_layer", "InfiniBand\n")):
        (port / name).write_text(text)
    assert network.ports(tmp_path) == (
        Port(name="mlx5_0:1", state="ACTIVE", rate="400 Gbit/s (4X NDR)", layer="InfiniBand"),
    )


def test_what_nvidia_smi_prints() -> None:
    rows = "".join(
        f"{i}, NVIDIA H200, GPU-{i}, 580.159.04, 143771, 143156, 9.0, 75.50, 700.00, 700.00, 345, 1980, Enabled, 0, "
        f"{i}, Enabled, Disabled, Not Active, Active\n"
        for i in range(2)
    )
    ways = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tSYS\t0-31\nGPU1\tSYS\t X \t0-31\n\nLegend:\n"
    peers = " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n"
    banner = "| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0 |"
    read = smi.read(rows, "GPU-1, 4242, [N/A]\n", banner, (ways, peers))
    assert (read["driver"], read["cuda"]) == ("580.159.04", "13.0")
    assert read["matrix"] == [["X", "PCIe"], ["-", "X"]]
    one, two = read["devices"]
    assert (one["memory"], one["capability"], one["power_limit"], one["ecc"]) == (143771 * MIB, [9, 0], 700.0, True)
    assert one["power"] == 75.5
    assert (one["processes"], two["processes"], two["uncorrected"]) == ([], [[4242, None]], 1)
    assert two["slowed"] == ["heat (software)"]
    nvlink = ways.replace("SYS", "NV18")
    assert smi.read(rows, "", banner, (nvlink, peers))["matrix"] == [["X", "NV18"], ["NV18", "X"]]
    assert smi.read(rows.replace("143771", "[N/A]"), "", "", ("", ""))["devices"][0]["memory"] is None


def test_a_tool_that_hangs_or_dies_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    (tmp_path / "fails.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    assert child.ask("hangs", seconds=0.5) == {"error": "no answer in 0 s"}
    assert child.ask("dies", seconds=20)["error"] == "it ended with code -6"
    assert "libcudart.so.13" in child.ask("fails", seconds=20)["error"]


def test_gpus_by_torch_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    seen = tuple(TorchDevice(name="NVIDIA L4", memory=24 * GIB, capability=(8, 9)) for _ in range(2))
    found = gpus.gpus(Torch(version="2.13", devices=seen, peers=((True, False), (False, True))))
    assert (found.source, found.why) == ("torch", "nvidia-ml-py and nvidia-smi are absent")
    assert found.devices[1] == GpuState(index=1, name="NVIDIA L4", memory=24 * GIB, capability=(8, 9))
    assert found.matrix == (("X", "-"), ("-", "X"))


@pytest.mark.parametrize("kind", ["file", "fifo", "loop"])
def test_what_is_no_folder_holds_no_runs(tmp_path: Path, kind: str) -> None:
    at = tmp_path / "runs"
    {"file": at.touch, "fifo": lambda: os.mkfifo(at), "loop": lambda: at.symlink_to(at)}[kind]()
    for folder in (at, at / "below"):
        assert probe_disk(folder).error == f"{at} is no folder"

"""Findings of machines that are described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from penteract.engine.doctor.finding import Finding, numbered
from penteract.engine.doctor.machine import (
    Disk,
    Gpus,
    GpuState,
    Host,
    HostReport,
    Package,
    Port,
    ProcessLimits,
    Torch,
    TorchDevice,
    Use,
)
from penteract.engine.doctor.report import as_json, can_train, examine
from penteract.engine.doctor.software import compiled, older
from penteract.units import GIB, MIB

PACKAGES = tuple(Package(name=n, found="9.9") for n in ("torch", "numpy", "safetensors", "tokenizers", "datasets"))
LAPTOP = HostReport(
    host=Host(
        system="Linux 6.1", python="3.11.7", cores=8, allowed=8, memory=16 * GIB, available=12 * GIB, shm=8 * GIB
    ),
    gpus=Gpus(why=""),
    torch=Torch(version="2.13.0+cpu", gloo=True, device="cpu", threads=8),
    disk=Disk(folder="runs", asked="/home/a/runs", free=200 * GIB, total=500 * GIB, speed=1e9, kind="ext4"),
    limits=ProcessLimits(nofile=(65536, 65536), memlock=(-1, -1), nproc=(-1, -1)),
    packages=PACKAGES,
    interfaces=("lo", "eth0"),
    use=Use(ranks=1, threads=8),
)
H200 = GpuState(
    index=0, name="NVIDIA H200", memory=140 * GIB, free=139 * GIB, capability=(9, 0), power_limit=700.0,
    power_default=700.0, clock=345, clock_most=1980, ecc=True, corrected=0, uncorrected=0, persistence=True, mig=False,
    processes=(), links=18, links_down=0,
)  # fmt: skip
NODE = replace(
    LAPTOP,
    gpus=Gpus(
        source="nvidia-ml-py", loaded=True, driver="580.159.04", cuda="13.0",
        devices=tuple(replace(H200, index=i) for i in range(8)),
        matrix=tuple(tuple("X" if i == j else "NV18" for j in range(8)) for i in range(8)),
    ),
    torch=Torch(
        version="2.13.0+cu130", cuda="13.0", cudnn="9.19.0", nccl="2.28.9", gloo=True, has_nccl=True, available=True,
        archs=("sm_80", "sm_90", "sm_100"), device="cuda",
        devices=tuple(TorchDevice(name="NVIDIA H200", memory=140 * GIB, capability=(9, 0)) for _ in range(8)),
    ),
    ports=tuple(
        Port(name=f"mlx5_{i}:1", state="ACTIVE", rate="400 Gbit/s (4X NDR)", layer="InfiniBand") for i in range(8)
    ),
)  # fmt: skip


def told(it: HostReport, *states: str) -> list[Finding]:
    return [f for f in examine(it) if f.state in (states or ("warn", "bad"))]


def only(found: Sequence[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def with_gpu(it: HostReport, index: int, **changes: Any) -> HostReport:
    devices = tuple(replace(g, **changes) if g.index == index else g for g in it.gpus.devices)
    return replace(it, gpus=replace(it.gpus, devices=devices))


def with_environment(it: HostReport, **variables: str) -> HostReport:
    return replace(it, environment=variables)


@pytest.mark.parametrize("it", [LAPTOP, NODE])
def test_nothing_is_wrong_with_a_sound_machine(it: HostReport) -> None:
    assert told(it) == []
    assert can_train(examine(it))


def test_a_laptop_trains_on_its_cpu() -> None:
    notes = told(LAPTOP, "note")
    assert [f.what for f in notes] == ["no GPU: no NVIDIA driver is loaded"]
    assert examine(LAPTOP)[-1].what == "penteract train: 1 rank on the CPU, no collectives, 8 CPU threads a rank"


def test_a_node_says_how_to_use_all_of_it() -> None:
    said = {f.what: f.fix for f in examine(NODE)}
    assert "8 x NVIDIA H200, 140.00 GiB each, compute capability 9.0: GPU 0-7" in said
    assert "every pair of GPUs: 18 NVLinks" in said
    assert "8 active ports between hosts: 8 x InfiniBand 400 Gbit/s (4X NDR)" in said
    assert said["7 GPUs would stay idle: a run has one rank unless its layout says more"].endswith("--parallel.dp 8")


def test_no_torch() -> None:
    found = only(told(replace(LAPTOP, torch=None), "bad"))
    assert (found.area, found.fix) == ("software", "pip install 'penteract[train]'")
    assert found.what.startswith("training needs torch: none is installed")


def test_a_torch_that_cannot_be_loaded() -> None:
    found = only(told(replace(LAPTOP, torch=Torch(error="libcudart.so.13: cannot open shared object file"))))
    assert found.state == "bad" and "libcudart.so.13" in found.what and found.fix.startswith("pip install")


def test_one_gpu_of_eight_with_ecc_errors() -> None:
    found = only(told(with_gpu(NODE, 3, uncorrected=2)))
    assert found.state == "bad" and found.what == "GPU 3: 2 uncorrected ECC errors since the driver started"
    assert "CUDA_VISIBLE_DEVICES=0,1,2,4,5,6,7;" in found.fix and "-i 3" in found.fix
    assert only(told(with_gpu(NODE, 3, remapping="failed"))).state == "bad"
    assert only(told(with_gpu(NODE, 3, remapping="pending"))).state == "warn"
    assert told(with_gpu(NODE, 3, corrected=5)) == []
    assert not any("no ECC error" in f.what for f in examine(with_gpu(NODE, 3, corrected=5)))


def test_unknown_ecc_counts_are_not_called_clean() -> None:
    assert not any("ECC" in f.what for f in examine(with_gpu(NODE, 3, uncorrected=None)))


def test_a_driver_older_than_torchs_cuda() -> None:
    old = replace(NODE.gpus, driver="550.54", cuda="12.4")
    blind = replace(NODE.torch or Torch(), available=False, devices=(), device="cpu")
    found = only(told(replace(NODE, gpus=old, torch=blind)))
    assert (found.area, found.state) == ("software", "bad")
    assert found.what == "driver 550.54 runs CUDA up to 12.4, and this torch needs 13.0"
    minor = replace(NODE, gpus=replace(old, cuda="13.0"), torch=replace(NODE.torch or Torch(), cuda="13.2"))
    assert told(minor) == []
    assert any("of the same major version" in f.what for f in told(minor, "note"))


def test_a_torch_without_cuda_on_a_node() -> None:
    found = only(told(replace(NODE, torch=LAPTOP.torch)))
    assert found.state == "bad" and "none of 8 GPUs" in found.what and "up to 13.0" in found.fix


def test_torchs_own_words_when_it_finds_no_gpu() -> None:
    blind = replace(NODE.torch or Torch(), available=False, devices=(), reason="CUDA unknown error", device="cpu")
    assert "CUDA unknown error" in only(told(replace(NODE, torch=blind))).what
    hidden = with_environment(replace(NODE, torch=blind), CUDA_VISIBLE_DEVICES="")
    assert only(told(hidden)).what == "CUDA_VISIBLE_DEVICES hides every GPU: a run uses the CPU"


def test_a_gpu_on_which_torch_cannot_add() -> None:
    whole = NODE.torch or Torch()
    devices = tuple(replace(d, works="uncorrectable ECC error") if i == 5 else d for i, d in enumerate(whole.devices))
    found = only(told(replace(NODE, torch=replace(whole, devices=devices))))
    assert found.state == "bad" and found.what == "torch's GPU 5 did not work: uncorrectable ECC error"
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,6,7" in found.fix


def test_kernels_for_a_gpu() -> None:
    archs = ("sm_80", "sm_86", "sm_90a", "sm_100")
    can = {c: compiled(archs, c) for c in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))}
    assert can == {
        (7, 5): False,
        (8, 0): True,
        (8, 9): True,
        (9, 0): True,
        (10, 0): True,
        (10, 3): True,
        (12, 0): False,
    }
    assert compiled((*archs, "compute_100"), (12, 0))
    found = only(told(with_gpu(NODE, 7, capability=(7, 0)), "bad"))
    assert "no kernels for GPU 7" in found.what


def test_small_shared_memory_matters_to_nccl() -> None:
    small = replace(NODE.host, shm=64 * MIB)
    found = only(told(replace(NODE, host=small)))
    assert found.state == "warn" and "64.00 MiB" in found.what and "--shm-size" in found.fix
    assert told(replace(LAPTOP, host=small)) == []


def test_a_full_disk() -> None:
    full = replace(LAPTOP.disk, free=3 * MIB, error="No space left on device", speed=None)
    found = told(replace(LAPTOP, disk=full))
    assert {f.state for f in found} == {"bad"} and all("make room" in f.fix for f in found)
    assert "No space left on device" in found[0].what
    refused = only(told(replace(LAPTOP, disk=replace(LAPTOP.disk, error="Permission denied", speed=None))))
    assert refused.state == "bad" and refused.fix.startswith("chmod u+w /home/a/runs")
    assert only(told(replace(LAPTOP, disk=replace(LAPTOP.disk, free=5 * GIB)))).state == "warn"
    assert only(told(replace(LAPTOP, disk=replace(LAPTOP.disk, speed=20e6)))).what.startswith(
        "written and flushed at 0.02"
    )
    assert only(told(replace(LAPTOP, disk=replace(LAPTOP.disk, files=3)))).state == "bad"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"processes": ((4242, 9 * GIB),), "free": 130 * GIB}, "1 process already on it (4242), 10.00 GiB in use"),
        ({"free": 100 * GIB}, "40.00 GiB in use by processes that cannot be seen"),
        ({"slowed": ("heat (hardware)",)}, "is held back now: heat (hardware)"),
        ({"power_limit": 400.0}, "power limit 400 W, by default 700 W"),
        ({"mig": True}, "MIG"),
        ({"ecc": False}, "ECC is off on GPU 6"),
        ({"links": 17, "links_down": 1}, "fewer NVLinks are up than the 18"),
    ],
)
def test_what_slows_one_gpu_of_eight(changes: dict[str, Any], said: str) -> None:
    found = only(told(with_gpu(NODE, 6, **changes)))
    assert found.state == "warn" and said in found.what and "6" in found.what and found.fix


def test_gpus_that_do_not_reach_each_other() -> None:
    apart = tuple(tuple("X" if i == j else "-" for j in range(8)) for i in range(8))
    assert "no peer access" in only(told(replace(NODE, gpus=replace(NODE.gpus, matrix=apart)))).what


def test_questions_stay_open_where_no_tool_is() -> None:
    """Only torch tells: no word of ECC, power or NVLink, and what would answer."""
    bare = tuple(GpuState(index=i, name="NVIDIA H200", memory=140 * GIB, capability=(9, 0)) for i in range(2))
    peers = (("X", "P2P"), ("P2P", "X"))
    why = "nvidia-ml-py and nvidia-smi are absent"
    it = replace(NODE, gpus=Gpus(source="torch", why=why, loaded=True, devices=bare, matrix=peers))
    notes = [f for f in told(it, "note") if "ot known" in f.what]
    assert [f.area for f in notes] == ["devices", "links"]
    assert why in notes[0].what and all(f.fix == "pip install nvidia-ml-py" for f in notes)
    assert not any("no ECC error" in f.what or "power limit" in f.what for f in examine(it))
    assert (
        "not known: how the GPUs reach" in only(told(replace(it, gpus=replace(it.gpus, matrix=None)), "note")[1:2]).what
    )


def test_limits() -> None:
    low = ProcessLimits(nofile=(1024, 2048), memlock=(8 * MIB, 8 * MIB), nproc=(-1, -1), tasks=512)
    assert [f.fix.split(",")[0] for f in told(replace(NODE, limits=low))] == [
        "ulimit -n 65536", "ulimit -l unlimited", "ulimit -u unlimited",
    ]  # fmt: skip
    assert [f.what for f in told(replace(LAPTOP, limits=replace(low, nofile=(8192, 8192))))] == []
    assert [f.what for f in told(replace(LAPTOP, limits=replace(low, nofile=(1024, 8192))))] == []  # ranks raise it


def test_as_many_open_files_as_the_ranks_of_a_launcher_need() -> None:
    """Of many ranks, four thousand are too few; of a few, a thousand are enough."""

    def warned(world: str, hard: int) -> list[Finding]:
        limits = replace(LAPTOP.limits, nofile=(256, hard))
        return told(replace(LAPTOP, limits=limits, environment={"WORLD_SIZE": world}), "warn")

    assert [f for f in warned("16", 1024) if f.area == "limits"] == []
    (found,) = (f for f in warned("4096", 8192) if f.area == "limits")
    assert "not enough for 4096 ranks, whose first needs 12430" in found.what and found.fix.startswith(
        "ulimit -n 65536"
    )
    assert [f for f in warned("4096", 16384) if f.area == "limits"] == []
    assert [f.area for f in warned("many", 1024) if f.area == "limits"] == ["limits"]


def test_variables_that_cost() -> None:
    found = told(with_environment(NODE, CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1", NCCL_DEBUG="INFO"))
    assert [f.fix for f in found] == ["unset CUDA_LAUNCH_BLOCKING", "unset NCCL_P2P_DISABLE"]
    found = told(with_environment(NODE, NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="ib0"))
    assert only(found).state == "bad" and "ib0" in only(found).what


def test_launchers() -> None:
    whole = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
    assert any("rank 3 of 16, they meet at h1:29500" in f.what for f in examine(with_environment(NODE, **whole)))
    part = only(told(with_environment(NODE, RANK="3", WORLD_SIZE="16")))
    assert part.what.startswith("RANK, WORLD_SIZE are set without LOCAL_RANK, MASTER_ADDR, MASTER_PORT")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "1"}
    assert told(with_environment(NODE, **slurm)) == []
    alone = only(told(with_environment(NODE, **slurm, SLURM_PROCID="0")))
    assert "each task would be a run of its own" in alone.what and "torchrun" in alone.fix


def test_more_threads_than_cores() -> None:
    """A container with the time of two cores, on a machine of 64."""
    host = replace(LAPTOP.host, cores=64, allowed=64, quota=2.5)
    it = replace(LAPTOP, host=host, use=Use(ranks=1, threads=64))
    assert host.usable == 2
    assert only(told(it)).fix == "OMP_NUM_THREADS=2"
    assert only(told(replace(it, use=Use(ranks=3, threads=1)))).fix == "fewer ranks"
    assert any("2 cores usable of the 64 here" in f.what for f in told(it, "note"))


def test_packages() -> None:
    few = (Package(name="torch", found="2.9.1", wanted=">=2.11"), *(Package(name=n) for n in ("numpy", "datasets")))
    found = {
        f.what.split(":")[0].split(" is ")[0]: f for f in told(replace(LAPTOP, packages=few), "note", "warn", "bad")
    }
    assert (found["torch 2.9.1"].state, found["no numpy"].state, found["no datasets"].state) == ("warn", "bad", "note")
    assert older("2.9.1", ">=2.11") and not older("2.11.0+cu130", ">=2.11") and not older("3", "<4,>=2.11")


def test_packages_of_kernels_are_looked_for_where_gpus_have_such() -> None:
    """Of each, one version is called."""
    few = (Package(name="flash-attn-4", wanted="==4.0"), Package(name="quack-kernels", found="0.6.4", wanted="==0.6.5"))
    notes = [f for f in told(replace(NODE, packages=(*NODE.packages, *few)), "note") if "kernels" in f.what]
    assert [f.what.split(":")[0] for f in notes] == ["no flash-attn-4", "quack-kernels 0.6.4"]
    assert "flash-attn-4==4.0" in notes[0].fix and "quack-kernels==0.6.5" in notes[1].fix
    right = (Package(name="quack-kernels", found="0.6.5", wanted="==0.6.5"),)
    assert any(f.what == "quack-kernels 0.6.5" for f in examine(replace(NODE, packages=(*NODE.packages, *right))))
    assert not any("kernels" in f.what for f in told(replace(LAPTOP, packages=(*LAPTOP.packages, *few))))


def test_what_a_run_would_use_is_told_where_one_can_start() -> None:
    """Nothing is well where no run starts: not without torch, on a full disk, nor with more ranks than GPUs."""
    full, many = replace(NODE.disk, free=MIB, error="No space left on device"), Use(ranks=9, threads=1)
    for it in (replace(LAPTOP, torch=None), replace(NODE, disk=full), replace(NODE, use=many)):
        assert not can_train(examine(it))
        assert not [f for f in examine(it) if f.area == "a run" and f.state != "bad"]
    assert (
        only([f for f in examine(replace(NODE, disk=full, use=many)) if f.area == "a run"]).what == "9 ranks for 8 GPUs"
    )
    blind = replace(LAPTOP, torch=replace(LAPTOP.torch or Torch(), device=""))
    assert only(told(blind)).what == "torch names no device"
    found = examine(LAPTOP, [Finding("disk", "the checkpoints are gone", "bad", "put them back")])
    assert found[-1].what == "the checkpoints are gone"


def test_every_problem_has_a_fix() -> None:
    broken = with_gpu(
        replace(NODE, torch=None, packages=(), host=replace(NODE.host, loopback="no lo")), 0, uncorrected=1
    )
    assert all(f.fix for f in told(broken)) and len(told(broken)) == 3


def test_json_is_what_the_table_documents() -> None:
    it = with_gpu(NODE, 3, uncorrected=2)
    given = json.loads(json.dumps(as_json(it, examine(it))))
    assert list(given) == ["schema", "version", "can_train", "findings", "machine"]
    assert given["can_train"] is False
    assert {tuple(row) for row in given["findings"]} == {("area", "what", "state", "fix")}
    assert set(given["machine"]) == {f.name for f in fields(HostReport)}


def test_numbers_for_people() -> None:
    assert numbered([5, 0, 2, 1]) == "0-2, 5"

"""The recipe for a GPU is followed: three tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penteract.api import plan
from penteract.config.catalog import hardware as hardware_catalog
from penteract.config.hardware import cluster
from penteract.errors import BadInput

GPU = """
[B300]
memory_gib = 267.7
bf16 = 2250.0
tf32 = 1125.0
fp32 = 75.0
fp8 = 4500.0
fp64 = 1.25
hbm = 8000.0
host_link = 126.0
multiprocessors = 148
aliases = ["B300-SXM"]
source = "a table of this test"
"""
FABRIC = """
[infiniband-xdr]
gb_per_second = 100.0
latency_us = 5.0
domain = 0
efficiency = 0.85
aliases = ["xdr"]
source = "a table of this test"
"""
NODE = """
[B300]
gpus_per_node = 8
inside = "nvlink5"
between = "infiniband-xdr"
"""


def test_a_gpu_is_three_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hardware"
    shutil.copytree(hardware_catalog.FOLDER, folder)
    for name, text in (("gpus", GPU), ("fabrics", FABRIC), ("nodes", NODE)):
        with (folder / f"{name}.toml").open("a", encoding="utf-8") as file:
            file.write(text)
    monkeypatch.setattr(hardware_catalog, "FOLDER", folder)
    found = cluster("16xb300-sxm")
    assert (found.name, found.gpus_per_node, found.memory_gib, found.curves) == ("2x8xB300", 8, 267.7, None)
    assert found.between is not None and found.between.name == "infiniband-xdr"
    best = plan("llama-3.1-8b", "16xB300", sequence_length=8192, batch="128seqs").best
    slower = plan("llama-3.1-8b", "16xH100", sequence_length=8192, batch="128seqs").best
    assert best.layout.world == 16 and best.time.seconds < slower.time.seconds
    monkeypatch.undo()
    with pytest.raises(BadInput, match="no such GPU"):
        cluster("16xB300")

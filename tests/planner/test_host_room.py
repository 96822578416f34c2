"""The memory of hosts: what a hardware file says of it limits what is offloaded, and saves in the background."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outside import penteract
from penteract.config.catalog.hardware import FOLDER
from penteract.config.hardware import Cluster, cluster
from penteract.planner.plan import Plan, estimator, plan_layouts, plan_one
from penteract.planner.question import question
from penteract.planner.report.as_json import as_dict
from penteract.planner.report.as_text import nothing_fits
from penteract.planner.report.host_room import HostRoom, crowded
from penteract.units import GIB

COPIED, OFFLOADED = 89.745, 74.790  # GiB of a host for a model of 8.03B parameters on eight GPUs


def machine(at: Path, gib: float | None) -> Path:
    """The file of a node whose host has so much memory."""
    text = (FOLDER / "8xh200.toml").read_text()
    of = "" if gib is None else f"host_memory_gib = {gib}\n"
    at.write_text(text.replace("gpus_per_node = 8\n", f"gpus_per_node = 8\n{of}"))
    return at


def one(gib: float, **layout: Any) -> Plan:
    ask = question("llama-3.1-8b", "8xH200")
    ask = replace(ask, cluster=replace(ask.cluster, host_memory_gib=gib))
    return plan_one(ask, {name: (value,) for name, value in layout.items()}, estimator)


@pytest.mark.parametrize(("gib", "fits"), [(0.0, True), (COPIED + 0.1, True), (COPIED - 0.1, False)])
def test_room_for_saves_in_the_background(gib: float, fits: bool) -> None:
    plan = one(gib, micro_batch_size=2, zero=1)
    host = HostRoom.of(plan, plan.best)
    assert host.saves_in_background is fits
    assert host.copied / GIB == pytest.approx(COPIED, abs=0.01)
    assert ("do not fit" in host.text()) is not fits
    assert bool(crowded(plan)) is not fits
    assert plan.refusal is None


@pytest.mark.parametrize(
    ("gib", "runs", "saves"),
    [(OFFLOADED - 0.1, False, False), (OFFLOADED + 0.1, True, False), (OFFLOADED + COPIED + 0.1, True, True),
     (OFFLOADED + COPIED - 0.1, True, False), (0.0, True, True)],
)  # fmt: skip
def test_what_is_offloaded_comes_first(gib: float, runs: bool, saves: bool) -> None:
    plan = one(gib, micro_batch_size=2, zero=1, offload_optimizer=True)
    assert (plan.counts.fit == 1) is runs
    assert (plan.refusal is None) is runs
    if runs:
        assert HostRoom.of(plan, plan.best).saves_in_background is saves
        assert plan.fits(plan.best.estimate)
        return
    assert plan.refusal is not None
    assert plan.refusal.found == "74.79 GiB of 8 GPUs"
    assert "offloads 74.79 GiB of 8 GPUs; a host has 74.69 GiB" in nothing_fits(plan)
    assert not crowded(plan)


def test_a_search_leaves_out_what_hosts_cannot_hold() -> None:
    """Layouts that offload are among the fastest where a GPU has little memory."""
    ask = question("llama-3.1-8b", "8xH100", pins={"offload_optimizer": (True, False), "tp": (1,), "pp": (1,)})

    def best(gib: float) -> Plan:
        return plan_layouts(replace(ask, cluster=replace(ask.cluster, host_memory_gib=gib)), estimator, top=8)

    large, small = best(0.0), best(OFFLOADED - 1)
    assert any(timed.layout.offload_optimizer for timed in large.layouts)
    assert not any(timed.layout.offload_optimizer for timed in small.layouts)
    plain = [timed.layout for timed in large.layouts if not timed.layout.offload_optimizer]
    assert [timed.layout for timed in small.layouts][: len(plain)] == plain
    assert len(small.layouts) == len(large.layouts)


def test_each_host_has_its_own() -> None:
    two = cluster("2x8xH200")
    assert replace(two, host_memory_gib=80.0).host_share == 10 * GIB
    assert Cluster(gpus=4, gpus_per_node=8, host_memory_gib=80.0).host_share == 20 * GIB
    assert two.host_share == 0


@pytest.mark.parametrize(("gib", "written"), [(64, False), (2048, True), (None, True)])
def test_the_run_file_waits_for_saves_where_a_host_has_no_room(tmp_path: Path, gib: int | None, written: bool) -> None:
    machine(tmp_path / "ours.toml", gib)
    words = ("plan", "llama-3.1-8b", "--gpus", "ours.toml", "--layout", "mbs=2,zero=1", "--out", "run.toml")
    done = penteract(tmp_path, *words)
    assert done.code == 0, done.err
    saves = tomllib.loads((tmp_path / "run.toml").read_text())["checkpoint"]
    assert saves.get("asynchronous", "left open") == ("left open" if written else False)
    assert ("checkpoint.asynchronous = false" in done.out) is not written


def test_json_tells_it_where_it_is_known() -> None:
    found = as_dict(one(64.0, micro_batch_size=2, zero=1))
    assert found["layouts"][0]["host"] == {
        "offloaded_gib": 0.0, "background_save_gib": pytest.approx(COPIED, abs=0.01), "memory_gib": 64.0,
        "saves_in_background": False,
    }  # fmt: skip
    assert any("64.00 GiB, too little" in note for note in found["notes"])
    assert "host" not in json.dumps(as_dict(one(0.0, micro_batch_size=2, zero=1))["layouts"])

"""Links: what ranks measure is what plans read; on the CPU with gloo, and the GPU's clock on a made-up timeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penteract.config.hardware import cluster
from penteract.engine.comm.comm import Work
from penteract.errors import BadInput
from penteract.measure.calibrate import checking, measuring
from penteract.measure.calibrate.hardware_file import hardware_file
from penteract.measure.calibrate.links import link_clock, measure_links
from penteract.measure.calibrate.links.link_operations import LinkOperation
from penteract.measure.calibrate.links.link_tables import contention, link_tables, measured_devices, slowed
from penteract.measure.calibrate.links.link_workloads import (
    COLLECTIVES,
    ON_GPU,
    PAIR,
    group_sizes,
    link_workloads,
    pairs,
)
from penteract.measure.calibrate.links.measure_links import LinkRows
from penteract.measure.calibrate.measured_rows import MeasuredRows
from penteract.measure.calibrate.workloads import workloads
from penteract.readings.costs.rates import GroupSpan, Rates

CPU, SIZES = torch.device("cpu"), (2**14, 2**12)


def of_two(path: Path) -> LinkRows:
    return LinkRows(path, 2, CPU, SIZES)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> LinkRows:
    """Rows of two ranks on this CPU."""
    links = of_two(tmp_path_factory.mktemp("links") / "here.rows.jsonl")
    assert links.measure(60.0, lambda line: pytest.fail(line)) == 0
    return links


@pytest.mark.alone
def test_plans_read_what_two_ranks_have_measured(measured: LinkRows, tmp_path: Path) -> None:
    rows = MeasuredRows.any_machine(measured.path)
    assert {*rows.rows} == {*measured.keys} and all(us is not None and us > 0 for us in rows.rows.values())
    assert {*rows.spreads} == {*rows.rows} and not measured.path.with_name("here.ranks").exists()
    rows.rows |= {w.key: 100.0 for w in workloads(CPU)}
    text = hardware_file(rows, CPU, measuring.provenance(CPU) | measuring.link_provenance(rows))
    (tmp_path / "here.toml").write_text(text)
    here = cluster(str(tmp_path / "here.toml"))
    assert here.gpus == 1 and here.curves is not None  # ranks of a CPU share it
    about = dict(here.curves.provenance)
    assert (about["link_ranks"], about["link_backend"]) == ("2", "gloo") and "median" in about["link_spread"]
    rates = Rates.of(here, "fp32")
    for kind in COLLECTIVES:
        for size in SIZES:
            us = rows.rows["link", kind, 2, size]
            assert us is not None
            found = rates.collective(kind, GroupSpan(2, 1), size)
            assert 0 < found <= 1.001e-6 * max(us, rows.rows["link", kind, 2, SIZES[0]] or 0)
    assert rates.collective("send", GroupSpan(2, 1), SIZES[0]) == pytest.approx(
        1e-6 * (rows.rows["link", "send", 2, SIZES[0]] or 0), rel=1e-3
    )
    assert rates.basis["collective"].startswith("measured: cpu")
    assert "while all_gather, reduce_scatter" in rates.basis["contention"]
    assert rates.contention == pytest.approx(max(1, sum(contention(rows).values()) / 6), rel=1e-3)


@pytest.mark.alone
def test_only_what_is_missing_is_measured_again(
    measured: LinkRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = of_two(tmp_path / "here.rows.jsonl")
    lines = measured.path.read_text().splitlines(keepends=True)
    again.path.write_text("".join(lines[:-2]))
    assert again.measure(60.0, lambda line: pytest.fail(line)) == 0
    now = again.path.read_text().splitlines(keepends=True)
    assert now[:-2] == lines[:-2] and [json.loads(x)["key"] for x in now[-2:]] == [
        json.loads(x)["key"] for x in lines[-2:]
    ]
    monkeypatch.setattr(measure_links, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert again.measure(60.0, lambda line: None) == 0
    said = list[str]()
    few = of_two(tmp_path / "few.rows.jsonl")
    assert few.measure(1.0, said.append) == 0 and LinkRows(few.path, 1, CPU, SIZES).measure(60.0, said.append) == 0
    assert "left out" in said[0] and said[1] == "a single device: there is no link to measure"
    with pytest.raises(BadInput, match="not a number of devices here"):
        LinkRows.of(few.path, 0)


@pytest.mark.alone
def test_a_check_measures_pairs_again(measured: LinkRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "here.toml"
    rows = MeasuredRows(measuring.rows_path(file), {"device": "cpu"})
    rows.add((PAIR, 0, 1, SIZES[0]), 1e-3)
    rows.add((PAIR, 1, 0, SIZES[0]), 1e9)
    monkeypatch.setattr(checking, "sizes_of", lambda device: SIZES)
    links = {(x.source, x.target): x for x in checking.check_links(file, CPU, 2)}
    assert {*links} == {(0, 1), (1, 0)}
    assert "slower than its file" in links[0, 1].slow and (links[1, 0].ratio or 1) < 1e-3
    monkeypatch.setattr(checking, "start_ranks", lambda *_, **__: 72)
    with pytest.raises(checking.LinksFailed) as failed:
        checking.check_links(file, CPU, 2)
    assert failed.value.code == 72 and checking.check_links(file, CPU) == []


@pytest.mark.alone
def test_a_rank_that_dies_ends_it_in_one_line(tmp_path: Path) -> None:
    words = ["-m", "penteract", "calibrate", "--out", "here.toml", "--budget", "300"]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("links 0/")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        second = next(p for p in children if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
        os.kill(int(second), signal.SIGKILL)
        rest = process.stderr.read().splitlines()
    errors = [line for line in rest if not line.startswith("links ")]
    assert process.returncode not in (0, 1) and len(errors) == 1 and "rank 1" in errors[0]
    assert "--resume" not in errors[0]
    assert not (tmp_path / "here.toml").exists()


def test_every_collective_over_every_group_and_every_pair_once() -> None:
    assert (group_sizes(8), group_sizes(6), group_sizes(2)) == ([8, 2, 4], [6, 2, 4], [2])
    for world in (2, 5, 6, 8):
        found = link_workloads(world, ON_GPU, gpu=True)
        keys = [key for w in found for key, _ in w.rows]
        assert len({*keys}) == len(keys)
        for n in group_sizes(world):
            for size in ON_GPU:
                for kind in (*COLLECTIVES, "shift"):
                    assert {("link", kind, n, size), ("link_under_product", kind, n, size)} <= {*keys}
        both = [group for w in pairs(world, 64) for group in w.groups]
        assert sorted(both) == sorted(permutations(range(world), 2))
        for w in found:
            ranks = [r for group in w.groups for r in group]
            assert len({*ranks}) == len(ranks) and max(ranks) < world
        before = keys.index(("link", "all_gather", world, ON_GPU[1]))
        assert keys.index(("product_under_link", "all_gather", world, ON_GPU[0])) < before  # what a file needs is first


def test_tables_are_all_there_or_none(tmp_path: Path) -> None:
    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {"device": "NVIDIA H200"})
    every = link_workloads(4, ON_GPU, gpu=True)
    needed = next(i for i, w in enumerate(every) if w.kind in ("h2d_all",))
    rows.rows = {key: 10.0 for w in every[: needed - 6] for key, _ in w.rows}
    assert measured_devices(rows) == 0 and not [*link_tables(rows)]  # no product beside a collective yet
    rows.rows = {key: 20.0 if w.way == "contended" and w.size else 10.0 for w in every[:needed] for key, _ in w.rows}
    found = tomllib.loads("\n".join(link_tables(rows)))
    assert measured_devices(rows) == 4 and {*found} == {"collectives", "p2p", "contention"}
    assert found["collectives"]["all_reduce"] == {str(n): [[ON_GPU[0], 10.0]] for n in (2, 4)}
    assert {*found["contention"].values()} == {2.0}
    rows.rows |= {key: 15.0 for w in every if w.way == "under" for key, _ in w.rows}
    rows.rows |= {key: 10.0 for w in every if w.way == "alone" for key, _ in w.rows}
    assert {*slowed(rows).values()} == {1.5} and len(slowed(rows)) == 6
    assert tomllib.loads("\n".join(link_tables(rows)))["p2p"]["one_way"] == [[s, 10.0] for s in sorted(ON_GPU)]


# ---- the GPU's clock, on a made-up timeline --------------------------------------------------------------------------

PRODUCT, COLLECTIVE = 1600.0, 500.0  # µs alone
CONTENDED, SLOWED = 1.25, 1.5  # times as long beside the other


@dataclass
class FakeGpu:
    """Two streams of one device. `at`: when each stream has done all that was asked of it, µs."""

    at: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "wires": 0.0, "side": 0.0})
    current: str = "compute"
    products: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    wires: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    slow_wires: bool = False

    def event(self, **_: Any) -> SimpleNamespace:
        made = SimpleNamespace(time=0.0, synchronize=lambda: None)

        def record() -> None:
            made.time = self.at[self.current]

        made.record, made.elapsed_time = record, lambda end: (end.time - made.time) / 1e3
        return made

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def multiply(self) -> None:
        begun = self.at["compute"]
        took = PRODUCT * (CONTENDED if begun < self.at["wires"] else 1)
        self.at["compute"] = begun + took
        self.products.append((begun, begun + took))

    def start(self) -> Work:
        begun = max(self.at["wires"], self.at[self.current])
        self.at["wires"] = begun + COLLECTIVE * (SLOWED if self.slow_wires else 1)
        self.wires.append((begun, self.at["wires"]))
        return Work([self.at["wires"]], ())

    def finish(self, work: Work | None) -> None:
        assert work is not None
        self.at[self.current] = max(self.at[self.current], work.waits[0])


def test_the_clock_of_a_gpu_times_what_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    for name, value in (("Event", gpu.event), ("Stream", lambda: "side"), ("stream", gpu.stream), ("synchronize", int)):
        monkeypatch.setattr(torch.cuda, name, value)
    hot: Any = SimpleNamespace(filler=gpu.multiply, heat=lambda: [gpu.multiply() for _ in range(12)])
    clock, op = link_clock.GpuLinkClock(hot), LinkOperation(gpu.start, gpu.finish)
    assert clock.alone(op) == pytest.approx(COLLECTIVE) and clock.product() == pytest.approx(PRODUCT)
    gpu.wires.clear()
    gpu.products.clear()
    assert clock.contended(op, COLLECTIVE, PRODUCT) == pytest.approx(PRODUCT * CONTENDED)
    assert gpu.products[-1][1] < gpu.wires[-1][1]  # it ran beside collectives to its end
    gpu.slow_wires = True
    gpu.wires.clear()
    assert clock.under_product(op, COLLECTIVE, PRODUCT) == pytest.approx(COLLECTIVE * SLOWED)
    assert gpu.wires[-1][1] < gpu.products[-1][1]  # and so did they
    assert gpu.current == "compute"

"""Links: what ranks measure is what plans read; on the CPU with gloo, and the GPU's clock on a made-up timeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import forks
from penteract.config.files.hardware_schema import DIRECT
from penteract.config.hardware import cluster
from penteract.engine.comm.comm import Work
from penteract.errors import BadInput
from penteract.measure.calibrate import checking, measuring
from penteract.measure.calibrate.hardware_file import hardware_file
from penteract.measure.calibrate.links import link_clock, measure_links
from penteract.measure.calibrate.links.link_operations import LinkOperation
from penteract.measure.calibrate.links.link_tables import (
    between_table,
    contention,
    link_tables,
    measured_devices,
    slowed,
)
from penteract.measure.calibrate.links.link_workloads import (
    COLLECTIVES,
    ON_GPU,
    PAIR,
    RINGS,
    Hosts,
)
from penteract.measure.calibrate.links.measure_links import LinkRows
from penteract.measure.calibrate.measured_rows import MeasuredRows
from penteract.measure.calibrate.workloads import workloads
from penteract.readings.costs.rates import GroupSpan, Rates

CPU, SIZES = torch.device("cpu"), (2**14, 2**12)


def of_two(path: Path) -> LinkRows:
    return LinkRows(path, Hosts(1, 2), CPU, SIZES, rounds=2)


def measure(links: LinkRows) -> tuple[int, list[str]]:
    """The exit code, and what was said."""
    said = list[str]()
    return links.measure(60.0, said.append), said


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> LinkRows:
    """Rows of two ranks on this CPU."""
    links = of_two(tmp_path_factory.mktemp("links") / "here.rows.jsonl")
    assert forks.answer(measure, links) == (0, [])
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
    for kind in (*COLLECTIVES, *DIRECT):
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
    beside = contention(rows)
    mean = (beside["all_gather"] + beside["reduce_scatter"]) / 2  # what FSDP has beside its products
    assert len(beside) == 6 and rates.contention == pytest.approx(max(1, mean), rel=1e-3)


@pytest.mark.alone
def test_only_what_is_missing_is_measured_again(
    measured: LinkRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = of_two(tmp_path / "here.rows.jsonl")
    lines = measured.path.read_text().splitlines(keepends=True)
    again.path.write_text("".join(lines[:-2]))
    assert forks.answer(measure, again) == (0, [])
    now = again.path.read_text().splitlines(keepends=True)
    assert now[:-2] == lines[:-2] and [json.loads(x)["key"] for x in now[-2:]] == [
        json.loads(x)["key"] for x in lines[-2:]
    ]
    monkeypatch.setattr(measure_links, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert again.measure(60.0, lambda line: None) == 0
    said = list[str]()
    few = of_two(tmp_path / "few.rows.jsonl")
    assert (
        few.measure(1.0, said.append) == 0
        and LinkRows(few.path, Hosts(1, 1), CPU, SIZES).measure(60.0, said.append) == 0
    )
    assert "left out" in said[0] and said[1] == "one device: there is no link to measure"
    with pytest.raises(BadInput, match="not a number of devices here"):
        LinkRows.of(few.path, 0)
    with pytest.raises(BadInput, match="a launcher has started the ranks"):
        LinkRows.of(few.path, 2, world=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert LinkRows.of(few.path, None, world=8).hosts == Hosts(2, 4)


LONG = ("calibrate", "--out", "here.toml", "--budget", "300")


def check_links(file: Path) -> list[checking.LinkCheck]:
    with patch.multiple(checking, LinkRows=partial(LinkRows, rounds=2), sizes_of=lambda device: SIZES):
        return checking.check_links(file, CPU, 2)


@pytest.mark.alone
def test_a_check_measures_pairs_again(measured: LinkRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "here.toml"
    rows = MeasuredRows(measuring.rows_path(file), {"device": "cpu"})
    rows.add((PAIR, 0, 1, SIZES[0]), 1e-3)
    rows.add((PAIR, 1, 0, SIZES[0]), 1e9)
    links = {(x.source, x.target): x for x in forks.answer(check_links, file)}
    assert {*links} == {(0, 1), (1, 0)}
    assert "slower than its file" in links[0, 1].slow and (links[1, 0].ratio or 1) < 1e-3
    late = iter(({(0, 1, 8): 9.0, (1, 0, 8): 5.0}, {(0, 1, 8): 5.0, (1, 0, 8): 5.1}, {(0, 1, 8): 4.0, (1, 0, 8): 4.0}))
    monkeypatch.setattr(checking, "_pairs", lambda device, ranks: next(late))
    late_once = checking.check_links(file, CPU, 2)
    assert [link.slow for link in late_once] == ["", ""], "only the first time"
    assert not any(link.slow for link in checking.check_links(file, CPU, 2)), "measured once"
    monkeypatch.undo()
    monkeypatch.setattr(checking, "start_ranks", lambda *_, **__: 72)
    with pytest.raises(checking.LinksFailed) as failed:
        checking.check_links(file, CPU, 2)
    assert failed.value.code == 72 and checking.check_links(file, CPU) == []


@pytest.mark.waits(10)
def test_a_request_ends_it_in_one_line(tmp_path: Path) -> None:
    words = ["-m", "penteract", *LONG]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("links 0/")
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert "STOPPED" in one_error(rest, tmp_path) and process.returncode == 75


@pytest.mark.waits(5)
def test_a_rank_that_dies_ends_it_in_one_line(tmp_path: Path) -> None:
    with forks.begun(LONG, os.environ, folder=tmp_path) as command:
        end, pid = time.monotonic() + 60, command.process.pid
        while not (command.err.exists() and command.err.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        assert command.err.read_text().startswith("links 0/")
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        done = command.result(60)
    assert "rank 1" in one_error(done.stderr, tmp_path) and done.returncode not in (0, 1, 75)


def one_error(said: str, folder: Path) -> str:
    """What was printed beside the progress; no file was written."""
    (line,) = [line for line in said.splitlines() if not line.startswith("links ")]
    assert "--resume" not in line and not (folder / "here.toml").exists()
    return line


def test_every_collective_over_every_group_and_every_pair_once() -> None:
    assert [Hosts(1, n).sizes() for n in (8, 6, 2, 1)] == [[8, 2, 4], [6, 2, 4], [2], []]
    for world in (2, 5, 6, 8):
        found = Hosts(1, world).workloads(ON_GPU, gpu=True, direct=True)
        keys = [key for w in found for key, _ in w.rows]
        assert len({*keys}) == len(keys)
        for n in Hosts(1, world).sizes():
            for size in ON_GPU:
                for kind in (*COLLECTIVES, *DIRECT, "shift"):
                    assert {("link", kind, n, size), ("under", kind, n, size)} <= {*keys}
        both = [group for w in Hosts(1, world).pairs(64) for group in w.groups]
        assert sorted(both) == sorted(permutations(range(world), 2))
        for w in found:
            ranks = [r for group in w.groups for r in group]
            assert len({*ranks}) == len(ranks) and max(ranks) < world
        before = keys.index(("link", "all_gather", world, ON_GPU[1]))
        assert keys.index(("contended", "all_gather", world, 4 * max(ON_GPU))) < before  # what a file needs is first


def test_a_rank_without_memory_is_told_what_helps() -> None:
    line = measure_links._without_memory("error[MEMORY]: out of memory · found 1 GiB · fix: a smaller micro-batch")
    assert line == (
        "error[MEMORY]: out of memory · found 1 GiB · fix: stop other programs on these devices, then run it again"
    )


def test_several_hosts_measure_inside_at_once_and_then_between(tmp_path: Path) -> None:
    hosts = Hosts(4, 2)
    found = hosts.workloads(ON_GPU, gpu=True, direct=True)
    keys = [key for w in found for key, _ in w.rows]
    assert len({*keys}) == len(keys)
    one = {key for w in Hosts(1, 2).workloads(ON_GPU, gpu=True, direct=True) for key, _ in w.rows}
    large, small = max(ON_GPU), min(ON_GPU)
    between = {("between", kind, n, large) for kind in RINGS for n in (2, 4)}
    assert {*keys} == one | between | {("between", "send", 2, size) for size in (small, large)}
    inside = next(w for w in found if w.rows[0][0] == ("link", "all_reduce", 2, small))
    assert inside.groups == ((0, 1), (2, 3), (4, 5), (6, 7)) and inside.rows[0][1] == tuple(range(8))
    pair = next(w for w in found if w.kind == PAIR)
    assert pair.rows == [((PAIR, 0, 1, ON_GPU[0]), tuple(range(8)))]  # equal pairs of hosts share a row
    send = next(w for w in found if w.way == "between" and w.kind == "send")
    assert send.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert next(w for w in found if w.way == "between" and w.rows[0][0][2] == 2).groups == ((0, 1, 2, 3), (4, 5, 6, 7))

    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {"device": "NVIDIA H200"})
    rows.rows = dict.fromkeys(keys, 100.0) | {w.key: 100.0 for w in workloads(CPU)}
    rows.rows |= {("between", "send", 2, large): 5000.0, ("between", "send", 2, small): 121.0}
    rows.rows |= {("link", "send", 2, size): 10.0 + size / 1e5 for size in ON_GPU}
    rows.rows |= {("between", "all_reduce", 4, large): 9000.0}
    table = tomllib.loads("\n".join(between_table(rows, "2026-11-25")))["between"]
    rate = (large - small) / (5000 - 121)  # bytes in a microsecond
    assert table["gb_per_second"] == pytest.approx(rate / 1e3, rel=1e-4) and table["devices"] == 2
    assert table["latency_us"] == pytest.approx((121 - small / rate - 10) / 2, rel=1e-3)
    assert [n for n, _ in table["bus"]["all_reduce"]] == [1, 2, 4]
    assert table["bus"]["all_reduce"][2][1] == pytest.approx(2 * 7 / 8 * large / 9e6, rel=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        (tmp_path / "a.toml").write_text(hardware_file(rows, torch.device("cuda"), {"date": "2026-11-25"}))
    here = cluster(str(tmp_path / "a.toml"))
    assert (here.gpus, here.gpus_per_node) == (8, 2) and here.between is not None and here.curves is not None
    assert dict(here.curves.memory)["h2d_all"] == pytest.approx(ON_GPU[0] / 100 / 1e3, rel=1e-4)
    rates = Rates.of(here, "bf16")
    for size, us in ((small, 121), (large, 5000)):
        assert rates.collective("send", GroupSpan(2, 2), size) == pytest.approx(1e-6 * us, rel=1e-3)
    assert rates.collective("all_reduce", GroupSpan(8, 4), large) == pytest.approx(9e-3, rel=0.01)
    assert "between nodes measured by penteract calibrate on 4 hosts" in rates.basis["collective"]
    assert cluster(str(tmp_path / "a.toml"), fabric="efa").between.name == "efa"  # type: ignore[union-attr]


def measure_as_a_host(file: Path) -> int:
    LinkRows(file, Hosts(2, 1), CPU, SIZES, launched=True, rounds=2).measure(60.0, print)
    return 0


@pytest.mark.alone
def test_ranks_of_a_launcher_measure_between_hosts(tmp_path: Path) -> None:
    """Two processes that each are all of a host."""
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(forks.free_port()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    file, errors = tmp_path / "here.rows.jsonl", [tmp_path / f"errors-{r}" for r in range(2)]
    started = [
        forks.start(
            measure_as_a_host, file, environment={**os.environ, **place, "RANK": str(r)}, out=tmp_path / f"out-{r}",
            err=errors[r],
        )
        for r in range(2)
    ]  # fmt: skip
    for process in started:
        process.join(120)
        process.kill()
        process.join()
    assert [process.exitcode for process in started] == [0, 0], [said.read_text() for said in errors]
    rows = MeasuredRows.any_machine(file)
    assert {*rows.rows} == {key for w in Hosts(2, 1).workloads(SIZES, gpu=False, direct=True) for key, _ in w.rows}
    rows.rows |= {w.key: 100.0 for w in workloads(CPU)}
    (tmp_path / "here.toml").write_text(hardware_file(rows, CPU, {"date": "2026-11-25"}))
    here = cluster(str(tmp_path / "here.toml"))
    assert (here.gpus, here.gpus_per_node) == (2, 1) and here.between is not None and here.between.name == "measured"
    assert here.between.gb_per_second > 0 and "on 2 hosts" in here.between.source


def test_tables_are_all_there_or_none(tmp_path: Path) -> None:
    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {"device": "NVIDIA H200"})
    every = Hosts(1, 4).workloads(ON_GPU, gpu=True, direct=True)
    needed = next(i for i, w in enumerate(every) if w.kind in ("h2d_all",))
    rows.rows = {key: 10.0 for w in every[: needed - 6] for key, _ in w.rows}
    assert measured_devices(rows) == 0 and not [*link_tables(rows)]  # no product beside a collective yet
    rows.rows = {key: 20.0 if w.way == "contended" and w.size else 10.0 for w in every[:needed] for key, _ in w.rows}
    found = tomllib.loads("\n".join(link_tables(rows)))
    assert measured_devices(rows) == 4 and {*found} == {"collectives", "p2p", "contention"}
    assert found["collectives"]["all_reduce"] == {str(n): [[ON_GPU[0], 10.0]] for n in (2, 4)}
    assert {*found["collectives"]} == {*COLLECTIVES, *DIRECT}
    assert {*found["contention"].values()} == {2.0}
    rows.rows |= {key: 15.0 for w in every if w.way == "under" for key, _ in w.rows}
    rows.rows |= {key: 10.0 for w in every if w.way == "alone" for key, _ in w.rows}
    assert {*slowed(rows).values()} == {1.5} and len(slowed(rows)) == 9
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
    long: float = 1.0

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
        self.at["wires"] = begun + self.long * COLLECTIVE * (SLOWED if self.slow_wires else 1)
        self.wires.append((begun, self.at["wires"]))
        return Work([self.at["wires"]], ())

    def finish(self, work: Work | None) -> None:
        assert work is not None
        self.at[self.current] = max(self.at[self.current], work.waits[0])


def test_the_clock_of_a_gpu_times_what_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    for name, value in (("Event", gpu.event), ("Stream", lambda: "side"), ("stream", gpu.stream), ("synchronize", int)):
        monkeypatch.setattr(torch.cuda, name, value)
    hot: Any = SimpleNamespace(heat=lambda: [gpu.multiply() for _ in range(12)])
    clock, op = link_clock.GpuLinkClock(hot, gpu.multiply), LinkOperation(gpu.start, gpu.finish)
    assert clock.alone(op) == pytest.approx(COLLECTIVE) and clock.product() == pytest.approx(PRODUCT)
    gpu.slow_wires = True
    gpu.wires.clear()
    gpu.products.clear()
    assert clock.under_product(op, COLLECTIVE, PRODUCT) == pytest.approx(COLLECTIVE * SLOWED)
    assert gpu.wires[-1][1] < gpu.products[-1][1]  # products ran beside them to their end
    gpu.wires.clear()
    gpu.long = 40.0
    assert clock.contended(op, 0.0, PRODUCT) == pytest.approx(PRODUCT * CONTENDED)
    assert gpu.wires[-1][0] <= gpu.products[-1][0] < gpu.products[-1][1] < gpu.wires[-1][1]  # within the operation
    assert gpu.current == "compute"

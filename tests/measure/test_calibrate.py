"""`penteract calibrate` on the CPU: what it writes is what plans read."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penteract.api import plan
from penteract.config.files.hardware_schema import PRODUCTS
from penteract.config.files.machine_file import machine_file
from penteract.config.hardware import cluster
from penteract.errors import BadInput
from penteract.measure.calibrate import attention_workloads, checking, hot_clock, measuring
from penteract.measure.calibrate.hardware_file import _node, catalogued, hardware_file, host_memory_gib
from penteract.measure.calibrate.hot_clock import HotClock
from penteract.measure.calibrate.measured_rows import MeasuredRows
from penteract.measure.calibrate.workloads import Workload, _adamw_on_gpu, workloads
from penteract.readings.costs.rates import Rates

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A hardware file of this CPU, with its rows beside it."""
    out = tmp_path_factory.mktemp("calibrated") / "here.toml"
    with patch.object(hot_clock, "CPU_SECONDS", 0.001), patch.object(hot_clock, "CALLS", 5):
        made = measuring.calibrate(out, 60.0, lambda at: None, CPU)
        assert (made.measured, made.skipped, made.missing) == (len(workloads(CPU)), 0, 0)
        out.write_text(made.text, encoding="utf-8")
        yield out


def test_what_it_writes_is_planned_with(measured: Path) -> None:
    here = cluster(str(measured))
    assert here.curves is not None and here.gpu is not None and here.gpu.name == "cpu"
    assert dict(here.curves.provenance)["torch"] == torch.__version__
    rates = Rates.of(here, "fp32")
    assert rates.basis["product"].startswith("measured: cpu") and rates.basis["collective"].startswith("modelled: cpu")
    assert rates.basis["attention"].startswith("modelled") and "H200" in rates.basis["collective"]
    best = plan("llama-3.2-1b", str(measured), sequence_length=256, batch="1seqs", precision="fp32").best
    assert best.time.seconds > 1


def test_it_goes_on_where_it_stopped(measured: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "here.toml", list[Any]()
    lines = measuring.rows_path(measured).read_text().splitlines(keepends=True)
    lost = [tuple(json.loads(line)["key"]) for line in lines[-3:]]
    measuring.rows_path(out).write_text("".join(lines[:-3]) + lines[-3][:30])  # the machine went down
    early = measuring.calibrate(out, 1e-12, lambda at: asked.append(at.key), CPU)
    assert (asked, early.missing) == ([], 3)  # what every file needs was there
    again = measuring.calibrate(out, 60.0, lambda at: asked.append(at.key), CPU)
    assert (asked, again.missing) == (lost, 0)
    assert measuring.calibrate(out, 60.0, lambda at: asked.append(at.key), CPU).text == again.text
    assert asked == lost


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError(), True), (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("no such shape"), False), (NotImplementedError(), False),
    ],
)  # fmt: skip
def test_memory_that_is_short_is_freed_once(error: Exception, short: bool) -> None:
    """For a library too, and after what the workload had made is gone: its traceback would keep that."""
    tried, freed = list[int](), list[bool]()

    def make(fails: int) -> Any:
        def op() -> None:
            tried.append(1)
            if len(tried) <= fails:
                raise error

        return lambda: op

    def took(fails: int) -> float | None:
        tried.clear()
        freed.clear()
        return measuring._one(Workload(("copy", 1), make(fails)), HotClock(CPU))

    with patch.object(torch.cuda, "empty_cache", lambda: freed.append(sys.exc_info() == (None, None, None))):
        assert (took(1) is not None, freed) == (short, [True] * short)
        assert took(9) is None and (len(tried), freed) == (1 + short, [True] * short)


def test_rows_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.rows.jsonl"
    MeasuredRows.of(path, {"device": "this"}).add(("copy", 1), 2.0)
    assert MeasuredRows.of(path, {"device": "this"}).rows == {("copy", 1): 2.0}
    with pytest.raises(BadInput, match=r"another machine .* found device this"):
        MeasuredRows.of(path, {"device": "that"})
    path.write_text("[]\n")
    with pytest.raises(BadInput, match="cannot read what was measured"):
        MeasuredRows.of(path, {})


def test_what_a_device_cannot_run_is_a_row_without_a_time(tmp_path: Path) -> None:
    def fails() -> Any:
        raise torch.OutOfMemoryError

    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {})
    measuring.measure([Workload(("product", "bf16"), fails)], rows, HotClock(CPU), 1.0, lambda at: None)
    assert rows.rows == {("product", "bf16"): None} and not list(rows.under("product"))
    with pytest.raises(BadInput, match="could not be measured"):
        hardware_file(rows, CPU, {})


def test_of_a_gpu_it_writes_attention_by_kernel_and_the_catalogue_names_it(tmp_path: Path) -> None:
    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {})
    with patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)):
        every = workloads(torch.device("cuda"))
    assert {"cudnn", "flash"} <= {w.key[1] for w in every if w.key[0] == "attention"}
    assert {w.key[1] for w in every if w.key[0] == "product"} == set(PRODUCTS)
    rows.rows = {w.key: 2000.0 if w.key[1] == "flash" else 1000.0 for w in every}
    with patch.object(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200"):
        text = hardware_file(rows, torch.device("cuda"), {"device": "NVIDIA H200"})
    (tmp_path / "h200.toml").write_text(text, encoding="utf-8")
    here = cluster(str(tmp_path / "h200.toml"))
    assert here.gpu == cluster("1xH200").gpu and here.curves is not None and here.curves.flash == (0.5, 0.5)
    shape = attention_workloads.SHAPES[0]
    flops = 2 * shape[0] * shape[1] * shape[3] ** 2 * shape[4]
    assert here.curves.attention[0] == pytest.approx((flops, 128, shape[3], flops / 1e9, 2.5 * flops / 1e9), rel=1e-4)
    assert catalogued("NVIDIA H100 80GB HBM3") == "H100" and catalogued("NVIDIA A100-SXM4-80GB") == "A100-80GB"
    assert catalogued("GeForce RTX 4090") is None


def test_operations_compute_what_they_say() -> None:
    one = next(o for o in attention_workloads.OPS["attention"].implementations if o.name == "cudnn")
    assert attention_workloads.speed_of(one, (1, 2, 1, 16, 128, 256)) == "cudnn"
    assert attention_workloads.speed_of(one, (1, 2, 1, 16, 192, 384)) is None
    reference = attention_workloads.OPS["attention"].implementations[-1]
    for way in ("forward", "input_gradient"):
        attention_workloads.operation(CPU, reference, (1, 2, 1, 16, 8, 16), way)()
    pytest.importorskip("triton")
    _adamw_on_gpu(CPU, 4096)()


def test_attention_is_timed_between_the_products_of_its_layer() -> None:
    """A layer of Llama-3-8B has 218 million weights in products: at 8,192 tokens 3.57 TFLOP forward."""
    with patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)):
        every = workloads(torch.device("cuda"))
    ways = {w.key[2]: w for w in every if w.key[0] == "attention" and w.key[3:] == (1, 32, 8, 8192, 128, 4096)}
    weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert ways["forward"].around == 2 * 8192 * weights and ways["input_gradient"].around == 4 * 8192 * weights
    asked = list[object]()
    clock: Any = SimpleNamespace(microseconds_in_layer=lambda op, around: asked.append(around) or 1.0)
    assert Workload(("attention",), lambda: lambda: None, around=8.0).microseconds(clock) == 1.0 and asked == [8.0]


def test_links_are_measured_together_or_not_at_all(measured: Path, tmp_path: Path) -> None:
    text = measured.read_text()
    path = tmp_path / "b.toml"
    path.write_text(text + "\n[contention]\nall_gather = 1.1\n", encoding="utf-8")
    with pytest.raises(BadInput, match="measured links are incomplete"):
        cluster(str(path))
    path.write_text(text + "\n[contentions]\nall_gather = 1.1\n", encoding="utf-8")
    with pytest.raises(BadInput, match="did you mean contention"):
        cluster(str(path))


def test_the_rows_are_lines_of_json_under_a_schema(measured: Path) -> None:
    head, *rows = map(json.loads, measuring.rows_path(measured).read_text().splitlines())
    assert head["schema"] == "penteract.calibration/2" and len(rows) == len(workloads(CPU))
    assert tomllib.loads(measured.read_text())["provenance"]["date"]


def test_a_device_is_slower_than_a_file_that_says_half_its_times(measured: Path, tmp_path: Path) -> None:
    file = tmp_path / "doctored.toml"
    file.write_text(measured.read_text())
    head, *rows = measuring.rows_path(measured).read_text().splitlines()
    halved = [json.dumps({**row, "us": row["us"] and row["us"] / 4}) for row in map(json.loads, rows)]
    measuring.rows_path(file).write_text("\n".join([head, *halved]) + "\n")
    (one,) = checking.check_devices(file, 60.0, [CPU])
    assert one.slow and one.middle > 1.5 and one.worst[1] >= one.middle
    kinds = {key[0] for key in one.ratios}
    assert {"copy", "product"} <= kinds and "launch" not in kinds
    doubled = [json.dumps({**row, "us": row["us"] and row["us"] * 4}) for row in map(json.loads, rows)]
    measuring.rows_path(file).write_text("\n".join([head, *doubled]) + "\n")
    (one,) = checking.check_devices(file, 60.0, [CPU])
    assert not one.slow
    measuring.rows_path(file).write_text(head + "\n")
    with pytest.raises(BadInput, match="no workload of this device"):
        checking.check_devices(file, 60.0, [CPU])
    measuring.rows_path(file).unlink()
    with pytest.raises(BadInput, match="rows that the file was made of are missing"):
        checking.check_devices(file, 60.0, [CPU])


def test_a_link_is_slow_beside_its_file_or_the_others() -> None:
    pairs = {(a, b, 2**26): 200.0 for a in range(4) for b in range(4) if a != b}
    assert not any(link.slow for link in checking.judged(pairs, pairs))
    slow = [x for x in checking.judged({**pairs, (1, 3, 2**26): 300.0}, {}) if x.slow]
    assert [(x.source, x.target, x.ratio) for x in slow] == [(1, 3, None)]
    assert slow[0].slow == "slower than the others, 1.50 times their time"
    assert slow[0].rate == pytest.approx(2**26 / 300e-6 / 1e9)
    all_slow = checking.judged({key: 300.0 for key in pairs}, pairs)
    assert {x.slow for x in all_slow} == {"slower than its file, 1.50 times its time"}
    assert checking.judged({}, {}) == checking.check_links(Path("a.toml"), CPU) == []


def test_the_machines_own_file(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BadInput, match=r"was not measured .* fix: penteract calibrate"):
        cluster("here")
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text(measured.read_text())
    assert cluster("here").gpus == 1 and cluster("here").gpu == cluster(str(measured)).gpu
    eight = cluster("8xhere")
    assert (eight.name, eight.gpus, eight.gpus_per_node) == ("8xhere", 8, 8)
    for size in ("0xhere", "64xhere"):
        with pytest.raises(BadInput, match="no fabric joins so many devices"):
            cluster(size)


@pytest.mark.parametrize("name", ["NVIDIA H200", "a card of no catalogue"])
def test_a_gpus_file_tells_what_its_host_has(tmp_path: Path, name: str) -> None:
    """A CPU's does not: its memory is its host's."""
    about = SimpleNamespace(name=name, multi_processor_count=1, total_memory=2**30, major=8, minor=9)
    rows = MeasuredRows(tmp_path / "a.rows.jsonl", {})
    with (
        patch("torch.cuda.get_device_name", lambda _: name),
        patch("torch.cuda.get_device_properties", lambda _: about),
    ):
        node = tomllib.loads("\n".join(_node(rows, torch.device("cuda"))))["node"]
    assert node["gpu"] == "H200" or node["gpu"]["capability"] == [8, 9]
    assert node["host_memory_gib"] == pytest.approx(host_memory_gib(), abs=0.01)
    assert "host_memory_gib" not in "".join(_node(rows, torch.device("cpu")))

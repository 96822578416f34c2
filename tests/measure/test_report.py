"""`penteract report`: today's predictions of every recorded row, and what it does with sweeps and sets of others."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penteract.cli import main
from penteract.config.hardware import Cluster, cluster
from penteract.config.layout import Layout
from penteract.config.resolve.resolved_run import resolve
from penteract.config.resolve.write_run_file import to_toml
from penteract.errors import BadInput
from penteract.measure.report.accuracy_page import accuracy_page, plots, summary_line
from penteract.measure.report.accuracy_record import AccuracyRecord
from penteract.measure.report.accuracy_row import ROUNDING, AccuracyRow, Amounts, baseline_of, worse_than
from penteract.measure.report.own_records import own_rows
from penteract.measure.report.published_sets import PLAYBOOK_LENGTH, PLAYBOOK_MODELS, playbook_layout, published_errors
from penteract.measure.schemas.sweep import (
    CaseMeasurement,
    CasePrediction,
    CaseProvenance,
    CaseResult,
    CaseStatus,
    SweepCase,
    SweepSettings,
)
from penteract.measure.schemas.sweep_folder import SweepFolder
from penteract.readings.composed import Composer
from penteract.readings.estimator import Estimator
from penteract.readings.memory import process_memory
from penteract.readings.memory.process_memory import Communicators

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module", autouse=True)
def opened_once() -> Iterator[None]:
    """What a rank opens follows from its program, not from rates: it is counted once for all that plan a row again.
    Counting is four fifths of planning all rows."""
    count, known = process_memory.communicators, dict[tuple[Any, ...], Communicators]()

    def counted(estimator: Estimator, layout: Layout, rank: int = 0) -> Communicators:
        nodes = replace(estimator.cluster, curves=None)
        of = estimator.model, nodes, estimator.sequence_length, estimator.policy, estimator.optimizer_kinds
        if (key := (*of, estimator.imbalance, layout, rank)) not in known:
            known[key] = count(estimator, layout, rank)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_memory, "communicators", counted)
        yield


@pytest.fixture(scope="module")
def today() -> list[AccuracyRow]:
    """All recorded rows, planned again."""
    return list(own_rows(RESULTS))


def recorded() -> AccuracyRecord:
    found = AccuracyRecord.read(RESULTS / "accuracy.json")
    assert found is not None
    return found


def test_no_recorded_row_is_predicted_worse_than_before(today: list[AccuracyRow]) -> None:
    rows, before = today, recorded()
    worse = worse_than(baseline_of(before.rows), rows)
    assert not worse, "\n".join(["fix the prediction, or say in the commit why, after `penteract report`:", *worse])
    assert {(row.group, row.name) for row in rows} == {(row.group, row.name) for row in before.rows}, "penteract report"


def slower_products(nodes: Cluster) -> Cluster:
    curves = nodes.curves
    if curves is None:  # an H100's rates are those of its data sheet
        return nodes
    gemm = tuple((dtype, tuple((*shape[:-1], 0.9 * shape[-1]) for shape in shapes)) for dtype, shapes in curves.gemm)
    return replace(nodes, curves=replace(curves, gemm=gemm))


def worse_attention(nodes: Cluster) -> Cluster:
    curves = nodes.curves
    if curves is None:  # an H100's rates are those of its data sheet
        return nodes
    attention = tuple((*shape, 0.9 * forward, 0.9 * backward) for *shape, forward, backward in curves.attention)
    return replace(nodes, curves=replace(curves, attention=attention))


@pytest.mark.parametrize("fault", [slower_products, worse_attention])
def test_a_rate_that_is_a_tenth_off_is_found(fault: Callable[[Cluster], Cluster]) -> None:
    before, rows, worse = baseline_of(recorded().rows), list[AccuracyRow](), list[str]()
    for row in own_rows(RESULTS, lambda text: fault(cluster(text))):
        rows.append(row)
        worse = worse_than(before, rows)
        if len(worse) > 5:  # planning all rows again takes long
            break
    assert len(worse) > 5
    assert all(": step: " in line and " % before, " in line and line.endswith(" % now") for line in worse)


def row(step: float, name: str = "a") -> AccuracyRow:
    return AccuracyRow(group="g", name=name, predicted=Amounts(step=step), measured=Amounts(step=100.0))


def test_worse_is_more_than_rounding() -> None:
    before = baseline_of([row(95.0), row(105.0, "b")])
    assert worse_than(before, [row(95.0)]) == worse_than(before, [row(95.0 - 50 * ROUNDING)]) == []
    assert worse_than(before, [row(104.9)]) == []  # on the other side, and nearer
    assert worse_than(before, [row(94.9), row(105.2, "b"), row(0.0, "new")]) == [
        "g: a: step: -5.00 % before, -5.10 % now", "g: b: step: +5.00 % before, +5.20 % now",
    ]  # fmt: skip


def test_rows_of_one_name_are_compared_in_their_order() -> None:
    before = baseline_of([row(98.0), row(90.0)])
    assert worse_than(before, [row(98.0), row(90.0)]) == []
    assert worse_than(before, [row(97.0), row(89.0)]) == [
        "g: a: step: -2.00 % before, -3.00 % now", "g: a (2): step: -10.00 % before, -11.00 % now",
    ]  # fmt: skip


def test_the_page_is_that_of_the_record() -> None:
    found, docs = recorded(), ROOT / "docs"
    page = accuracy_page(found, "accuracy", "../benchmarks/results/accuracy.json")
    assert (docs / "accuracy.md").read_text(encoding="utf-8") == page, "penteract report"
    for quantity, svg in plots(found).items():
        assert (docs / f"accuracy_{quantity}.svg").read_text(encoding="utf-8") == svg
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert summary_line(found).removeprefix("Predicted ") in readme


def a_sweep(folder: Path) -> None:
    """One case that is done, one that failed; on CPUs, so memory alone is predicted."""
    sweep, names = SweepFolder(folder), ("001_a", "002_b")
    resolved = resolve(None, "tiny", ["parallel.pp=2", "batch.sequence_length=32"], world=2)
    allocated = 2**26
    for number, name in enumerate(names, 1):
        case = SweepCase(
            name=name, number=number, origin="grid", varied={}, model="tiny", parameters=1, layout={},
            layout_text="pp=2", ranks=2, precision="fp32", global_batch_size=4, sequence_length=32,
            model_flops=1, model_flops_causal=1, limit_s=9, predicted=CasePrediction(allocated_bytes=7),
        )  # fmt: skip
        sweep.case(name).make(case, to_toml(resolved))
        sweep.case(name).write_status(CaseStatus(state="done" if number == 1 else "failed", attempt=1))
    measured = CaseMeasurement(
        tokens_per_s_per_gpu=1, step_s=0.5, spread=0.0, steps_s=(0.5,), warmup_s=(), losses=(1.0,), loss_falls=True,
        allocated_bytes=(allocated // 2, allocated),
    )  # fmt: skip
    provenance = CaseProvenance(versions={}, commit="", device="cpu", hosts=(), began="", ended="")
    sweep.case(names[0]).write_result(CaseResult(attempt=1, measured=measured, provenance=provenance))
    sweep.write_settings(SweepSettings(name="s", steps=1, warmup=0, limit_s=9, data="random", cluster="", command="",
                                       cases=names))  # fmt: skip


def test_a_sweep_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not what its case.json says was predicted."""
    monkeypatch.chdir(tmp_path)
    a_sweep(tmp_path / "mine")
    words = ["report", "--sweeps", "mine", "--out", "page.md", "--record", "page.json"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("page.md: 1 rows. Predicted allocated memory is off by ")
    (made,) = json.loads((tmp_path / "page.json").read_text())["rows"]
    run = resolve(None, "tiny", ["parallel.pp=2", "batch.sequence_length=32"], world=2).run
    composer = Composer(run.model, 32, run.precision.policy, run.optimizer.optimizer_kinds)
    expected = max(composer.rank(run.layout, pp_rank).allocated for pp_rank in (0, 1)) / 2**30
    assert made["predicted"] == {"allocated": pytest.approx(expected, rel=1e-5)}
    assert made["measured"] == {"allocated": 0.0625, "step": 500.0}
    page = (tmp_path / "page.md").read_text()
    assert "sweep mine" in page and "001_a" in page and "002_b" not in page
    assert (tmp_path / "page_allocated.svg").is_file() and not (tmp_path / "page_step.svg").exists()
    (tmp_path / "page.json").write_text(
        (tmp_path / "page.json").read_text().replace(str(made["predicted"]["allocated"]), "0.0625")
    )
    assert main(words) == 0
    assert "1 errors have grown:\n  sweep mine: 001_a: allocated: +0.00 % before" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["page.md", "page_allocated.svg"])
def test_a_file_that_no_report_wrote_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    a_sweep(tmp_path / "mine")
    (tmp_path / name).write_text("# mine\n")
    assert main(["report", "--sweeps", "mine", "--out", "page.md", "--record", "page.json"]) == 2
    refused = capsys.readouterr().err
    assert "it exists already" in refused and f"found {name}" in refused and "fix: choose another name" in refused
    assert (tmp_path / name).read_text() == "# mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["mine", name])


def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "flash_attention.json").write_text("{}")
    for words in ([], ["--sweeps", "none"], ["--record", "bad.json"], ["--out", "page.html"], ["--records", "records"]):
        assert main(["report", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_a_set_of_others_leaves_errors_alone(tmp_path: Path) -> None:
    """Half the tokens a second measured: a step that took twice as long."""
    with pytest.raises(BadInput, match="no published set"):
        published_errors(tmp_path)
    values = {"model_params_B": "1.34", "nodes": "1", "dp": "4", "tp": "1", "pp": "2", "zero_stage": "1",
              "micro_batch_size": "4", "grad_acc_steps": "16", "gbs_sequences": "256",
              "status": "completed"}  # fmt: skip
    found: list[float] = []
    for rate in (10_000.0, 20_000.0):
        with (tmp_path / "playbook_sweep_h100.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*values, "tokens_per_s_per_gpu"])
            writer.writeheader()
            writer.writerows([values | {"tokens_per_s_per_gpu": rate}, values | {"status": "failed"}])
        (summary,) = published_errors(tmp_path).values()
        assert summary.n == 1 and summary.mean == summary.median == summary.worst
        found.append(summary.worst)
    assert playbook_layout(values).global_batch_size == 256 and PLAYBOOK_LENGTH == 4096 and "1.34" in PLAYBOOK_MODELS
    slow, fast = found  # planned faster than both: errors of -3/4 and -1/2 would be 0.75 and 0.5
    assert 1 - fast == pytest.approx(2 * (1 - slow))


def test_reserved_and_device_memory_of_fresh_processes_are_predicted(today: list[AccuracyRow]) -> None:
    """Within 1 % and 256 MiB, though only the first case of each kind has told what a process takes."""
    rows = [row for row in today if row.group.startswith("bench_")]
    assert len(rows) == 165  # 34 of them planned as they were routed, too
    unknown = [row.name for row in rows if row.predicted.reserved is None]  # groups that carry messages, routed sizes
    # Of tp the rows that read other ranks' registers.
    carried = ("_ep2_", "_expert-rows-", "_cp-method-ulysses_", "tp2_")
    assert len(unknown) == 83 and all(any(part in name for part in carried) for name in unknown)
    for row in (row for row in rows if row.predicted.reserved is not None):
        assert row.predicted.reserved and row.measured.reserved and row.predicted.device
        assert abs(row.predicted.reserved / row.measured.reserved - 1) < 0.001
        if row.measured.device is None:
            assert row.name.startswith("010_pp2_")  # another process held memory of that GPU
            continue
        copies = "offload" in row.name  # to the host and back: what the driver takes for them is not predicted
        assert abs(row.predicted.device - row.measured.device) < (0.15 if copies else 0.03)
